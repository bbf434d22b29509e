"""Model modules of SGLang that a scheduler need not import: it would import 200, for over a second, to serve one."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

ENV = "SGLANG_DISABLED_MODEL_ARCHS"
"""SGLang does not look into modules that are named here."""


def sglangs() -> Path:
    """The folder of SGLang's model modules; found without importing SGLang."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "srt" / "models"


def unneeded(architectures: Sequence[str], folder: Path) -> list[str]:
    """Names of the modules whose EntryClass, SGLang's list of what a module offers, has none of the architectures.

    None where no module has one: SGLang then says what it knows, or takes another library's.
    """
    if not architectures:
        return []
    names = re.compile(r"\b(" + "|".join(map(re.escape, architectures)) + r")\b")
    offers = {path.stem: path.read_text().partition("\nEntryClass")[2] for path in sorted(folder.glob("*.py"))}
    others = [module for module, entries in offers.items() if not names.search(entries)]
    return others if len(others) < len(offers) else []


def environment(architectures: Sequence[str]) -> dict[str, str]:
    """Environment of a scheduler's process."""
    return {ENV: ",".join(found)} if (found := unneeded(architectures, sglangs())) else {}
