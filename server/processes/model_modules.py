"""Keep a scheduler from importing 200 model modules of SGLang, which takes over a second, to serve one model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

ENV = "SGLANG_DISABLED_MODEL_ARCHS"
"""Environment variable: SGLang skips the modules named in it."""


def sglangs() -> Path:
    """Return the folder of SGLang's model modules; found without importing SGLang."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "srt" / "models"


def unneeded(architectures: Sequence[str], folder: Path) -> list[str]:
    """Return names of the modules without any of the architectures in EntryClass, SGLang's list of a module's models.

    Empty if no module has one: SGLang then lists its models in an error, or runs another library's.
    """
    if not architectures:
        return []
    names = re.compile(r"\b(" + "|".join(map(re.escape, architectures)) + r")\b")
    offers = {path.stem: path.read_text().partition("\nEntryClass")[2] for path in sorted(folder.glob("*.py"))}
    unused = [module for module, entries in offers.items() if not names.search(entries)]
    return unused if len(unused) < len(offers) else []


def environment(architectures: Sequence[str]) -> dict[str, str]:
    """Return the environment of a scheduler's process."""
    return {ENV: ",".join(modules)} if (modules := unneeded(architectures, sglangs())) else {}
