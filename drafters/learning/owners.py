"""Owners of drafters: API keys, or LoRA adapters and the model.

Each has a learner with its own answers, drafters and state, in a subfolder of the server's learner's folder; the
model's learner has that folder itself.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.storage.replacing import replace

from ..adapter_folder import AdapterFolder
from .answers import ADAPTERS, FORGOTTEN, KEYS, NAMED_IN

MODEL = "."
"""Learner of the model's requests, if adapters have their own."""


@dataclass(frozen=True, slots=True)
class Owner:
    """An API key, a LoRA adapter, or the model with the name "".

    digest: of the adapter's folder `path` (`AdapterFolder.digest`); "": no adapter.
    """

    name: str
    digest: str = ""
    path: str = ""

    def __str__(self) -> str:
        if not self.name:
            return "the model"
        return f"{'adapter' if self.digest else 'key'} {self.label}"

    @property
    def label(self) -> str:
        """Its name; an adapter's with the beginning of the digest, since several may have had the name."""
        return f"{self.name}@{self.digest[:8]}" if self.digest else self.name

    @property
    def learner(self) -> str:
        """Its learner's subfolder. Another adapter with the same name has another folder."""
        if not self.digest:
            return f"{KEYS}/{hashlib.sha256(self.name.encode()).hexdigest()[:32]}"
        return f"{ADAPTERS}/{hashlib.sha256(f'{self.digest} {self.name}'.encode()).hexdigest()[:32]}"


def make(folder: Path, owner: Owner) -> Path:
    """Return the learner's folder of an owner, made where needed. folder: the server's. Raises OSError."""
    made = folder / owner.learner
    if owner_of(made) != owner:
        for each in (folder, made.parent, made):
            each.mkdir(mode=0o700, exist_ok=True)
        about = {name: value for name, value in asdict(owner).items() if value}
        replace({made / NAMED_IN[made.parent.name]: json.dumps(about) + "\n"}, 0o600)
    return made


def learners(folder: Path, kind: str) -> list[Path]:
    """Return the folders of the learners of all keys (`KEYS`) or adapters (`ADAPTERS`), in the order of their names."""
    inside = folder / kind
    folders = inside.iterdir() if inside.is_dir() else ()
    return sorted(path for path in folders if path.name[:1] != "." and path.is_dir())


def owner_of(learner: Path) -> Owner | None:
    """Return the owner of a learner's folder; None if it is unknown or the model."""
    try:
        owner = Owner(**json.loads((learner / NAMED_IN[learner.parent.name]).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return owner if all(isinstance(value, str) for value in asdict(owner).values()) else None


def adapter_of(owner: Owner | None) -> AdapterFolder | None:
    """Return an owner's adapter; None for a key or the model. Raises ValueError if it is gone or has changed."""
    if owner is None or not owner.digest:
        return None
    adapter = AdapterFolder.open(Path(owner.path))
    if adapter.digest() != owner.digest:
        raise ValueError(f"{owner.path} holds another adapter than the {owner} that was served")
    return adapter


def forget_owner(learner: Path) -> None:
    """Delete a learner with all its data; it disappears at once for other processes. Raises OSError."""
    aside = learner.with_name(FORGOTTEN.format(learner.name))
    shutil.rmtree(aside, ignore_errors=True)  # left by a killed process
    learner.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
