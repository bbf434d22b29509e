"""Learners of single keys: folders in a learner's folder, each with answers, drafters and state of its own."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from outrider.storage.replacing import replace

from .answers import FORGOTTEN, KEY_NAME, KEYS


def learner_of(key: str) -> str:
    """Name of the folder of a key's learner."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def make(folder: Path, key: str) -> Path:
    """The learner's folder of a key, in that of a server, made if it is not there. Raises OSError."""
    made = folder / KEYS / learner_of(key)
    if not (made / KEY_NAME).is_file():
        for each in (folder, folder / KEYS, made):
            each.mkdir(mode=0o700, exist_ok=True)
        replace({made / KEY_NAME: json.dumps({"name": key}) + "\n"}, 0o600)
    return made


def learners(folder: Path) -> list[Path]:
    """Folders of all keys' learners, in the order of their names."""
    keys = folder / KEYS
    return sorted(path for path in keys.iterdir() if path.name[:1] != "." and path.is_dir()) if keys.is_dir() else []


def name_of(learner: Path) -> str:
    """The name of a learner's key; "" where it is not known."""
    try:
        return str(json.loads((learner / KEY_NAME).read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def forget_key(learner: Path) -> None:
    """Delete a key's learner with all that it kept and learned, at once for those who look for it. Raises OSError."""
    aside = learner.with_name(FORGOTTEN.format(learner.name))
    shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
    learner.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
