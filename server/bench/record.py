"""The file that `--json` writes: results with their machine, weights and command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.kernels.cpu import native
from outrider.profiles.fingerprint import core_count, cpu_name, folder_digest, package_version

if TYPE_CHECKING:
    from ..settings.resolve import Resolved

PROGRAM = "outrider"
"""First word of a record's command."""
PACKAGES = ("outrider", "sglang", "torch")


def write(
    path: Path | None,
    question: str,
    results: Any,
    *,
    resolved: Resolved | None = None,
    weights: Mapping[str, Path | str] | None = None,
    **more: Any,
) -> None:
    """Write a record if --json was given.

    question: the benchmark's name. resolved: the measured engine. weights: without an engine, folders or digests by
    role. more: entries besides `results`. The last minute's load average shows other load on the machine.
    """
    if path is None:
        return
    machine = {"device": cpu_name(), "cores": core_count(), "instruction_set": native.instruction_set()}
    digests = {
        name: folder_digest(found) if isinstance(found, Path) else found for name, found in (weights or {}).items()
    }
    if resolved is not None:
        from ..settings import profile_lookup

        engine = profile_lookup.fingerprint(resolved.settings, resolved.model).to_json()
        digests = {"target": engine["target"], "drafter": engine["drafter_checkpoint"]}
        machine |= {"device": engine["device"]}
        more["engine"] = engine | {"model": resolved.model.name}
    whole = {
        "question": question,
        "command": f"{PROGRAM} {shlex.join(sys.argv[1:])}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: package_version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": machine,
        "load_average": round(os.getloadavg()[0], 1),
        "weights": digests,
        **more,
        "results": results,
    }
    lines = (f"{json.dumps(name)}: {json.dumps(entry, default=_plain)}" for name, entry in whole.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # one line per entry keeps rounds short


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def acceptance_counts(value: Any) -> Iterator[dict[str, Any]]:
    """Every {"tried": …, "kept": …} in a record of a load or of drafters."""
    if isinstance(value, dict):
        if {"tried", "kept"} <= value.keys():
            yield value
        else:
            for inner in value.values():
                yield from acceptance_counts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from acceptance_counts(inner)
