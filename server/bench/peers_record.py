"""What `outrider bench peers` has measured so far: a file that a run which was cut short is taken up from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from . import harness

Results = dict[str, dict[str, list[float]]]
"""{case: {arm: [tokens per second, one per round]}}; a case is a concurrency, or "prefill N"."""
UNASKED = {"arms", "json", "plot", "resume", "rounds", "run"}
"""Flags that do not change what a case measures."""


class Footprint(NamedTuple):
    """What an engine costs beside its time: seconds until it was ready, and bytes of memory of all its processes.

    pss: what several processes share is counted once. rss: the sum of what each sees.
    """

    ready_seconds: float
    pss: int
    rss: int


class Record:
    """Rates by case and arm, and what the engines cost. With --resume it begins with what --json FILE holds.

    Raises
    ------
    UserError
        The file was measured with other flags, or is not one of ours.
    """

    def __init__(self, args: argparse.Namespace, cases: Sequence[str], arms: Sequence[str]):
        self.path: Path | None = args.json
        self.results: Results = {case: {arm: [] for arm in arms} for case in cases}
        self.engines: dict[str, Footprint] = {}
        self.flags = {name: str(value) for name, value in sorted(vars(args).items()) if name not in UNASKED}
        if args.resume and self.path is not None and self.path.exists():
            self._take_up(self.path)

    def done(self, number: int, case: str) -> bool:
        """Whether every arm has its rate of this round, so that they took turns."""
        return all(len(rates) > number for rates in self.results[case].values())

    def write(self) -> None:
        engines = {name: footprint._asdict() for name, footprint in self.engines.items()}
        harness.write_json(self.path, {"tokens_per_second": self.results, "engines": engines, "flags": self.flags})

    def _take_up(self, path: Path) -> None:
        try:
            kept: dict[str, Any] = json.loads(path.read_text())
            flags, results = kept["flags"], kept["tokens_per_second"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--resume: {path} is not what bench peers writes") from None
        for name, value in self.flags.items():
            if flags.get(name) != value:
                was = f"--{name.replace('_', '-')} {flags.get(name)}"
                raise UserError(f"--resume: {path} was measured with {was}, not {value}; name another file")
        for case, rates in self.results.items():
            rates.update({arm: results.get(case, {}).get(arm, []) for arm in rates})
