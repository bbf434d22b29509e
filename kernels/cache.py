"""The user's cache for files made once per machine or user: compiled kernels, models, profiles."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Return OUTRIDER_CACHE, else XDG_CACHE_HOME/outrider, else ~/.cache/outrider; it need not exist."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider"
