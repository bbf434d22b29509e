"""The drafters of a learner's folder: loaded, saved, and followed along answers.

Candidates are numbered folders in `drafters/`, each whole or absent.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.storage.replacing import replace, sync, sync_tree

from .. import networks
from ..block.model import TrainedModel
from ..commands import train
from ..diffusion.denoise import Schedule
from ..training.batches import BatchMaker
from ..training.forward import frozen_part
from ..training.store import Sequence
from ..training.target import TargetModel
from ..training.validate import drafts_of
from .answers import ServerState, candidate_names
from .gate import Followed, follow, follow_alone
from .lookups import Lookups
from .start import FROM_TARGET

KEPT = 2
"""Candidates kept that are older than the one in use, to return to, and as many newer ones."""


class Drafters:
    """The server's first drafter, named None, and the candidates by their names."""

    def __init__(self, args: argparse.Namespace, target: TargetModel) -> None:
        self.args, self.target, self.candidates = args, target, Path(args.folder) / "drafters"
        self.lookups = Lookups(args.kind, args.lookup_gamma)
        self.followed: dict[str | None, dict[str, Followed]] = {}

    def folder_of(self, name: str | None) -> Path | None:
        """Return a drafter's folder; the first one's if a learned one is gone; None if there is none yet."""
        if name and (self.candidates / name / "config.json").exists():
            return self.candidates / name
        return None if self.args.start == FROM_TARGET else Path(self.args.start)

    def load(self, folder: Path, dtype: torch.dtype | None = None) -> TrainedModel:
        """Return the drafter of a folder, in the target's dtype or another."""
        model = train.read_drafter(folder, self.args.kind, self.target)
        return model.to(device=self.target.device, dtype=dtype or self.target.embedding.dtype)

    def save(self, model: TrainedModel, folder: Path) -> None:
        networks.save(model, frozen_part(model, self.target).head, folder)

    def schedule(self, model: TrainedModel) -> Schedule | None:
        """Return the denoising schedule of the drafter; None if it does not denoise."""
        return train.schedule_of(self.args.kind, model.config.gamma, self.args.denoising_steps)

    def follow(self, folder: Path, sequences: Iterable[Sequence]) -> list[Followed]:
        """Follow answers with the drafter of a folder."""
        model = self.load(folder)
        drafts = drafts_of(model, frozen_part(model, self.target), self.schedule(model))
        return follow(drafts, BatchMaker(model.config, model.vocab, device=self.target.device), sequences, self.lookups)

    def follow_once(self, name: str | None, answers: Mapping[str, Callable[[], Sequence]]) -> list[Followed]:
        """Follow answers, by digest, with this drafter, or with none where there is none, each once."""
        folder, kept = self.folder_of(name), self.followed.setdefault(name, {})
        if missing := [digest for digest in answers if digest not in kept]:
            sequences = (answers[digest]() for digest in missing)
            made = self.follow(folder, sequences) if folder else follow_alone(self.lookups, 1, sequences)
            kept.update(zip(missing, made, strict=True))
        return [kept[digest] for digest in answers]


def next_name(learner: Path) -> str:
    """Return a new name among this learner's candidates."""
    return f"{1 + max(map(int, candidate_names(learner)), default=0):04}"


@torch.no_grad()
def mixed(first: TrainedModel, trained: TrainedModel, share: float) -> TrainedModel:
    """Return `first` moved towards `trained`: weights on the line between them, `share` of the way.

    Such a mixture keeps most of the training's gain, and recovers most of its loss elsewhere (Wortsman et al., Robust
    fine-tuning of zero-shot models, 2022, equation 1). Raises ValueError if the shapes differ.
    """
    trained_weights = dict(trained.named_parameters())
    for name, weight in first.named_parameters():
        if name not in trained_weights or trained_weights[name].shape != weight.shape:
            raise ValueError(f"{name} is not in both drafters, or has another shape")
        weight.lerp_(trained_weights[name], share)
    return first


def complete(folder: Path, verdict: dict[str, Any], followed: list[Followed]) -> None:
    """Write the gate's data to a candidate's folder: gate.json, and held-out.npz, from which the server makes its
    calibration: confidence [N, gamma] float32, accepted and reach [N] int64, as in `Followed`; answer [N] int64, the
    number of each draft's answer."""
    replace({folder / "gate.json": json.dumps(verdict) + "\n"}, 0o600)
    columns = ("confidence", "accepted", "reach")
    arrays: dict[str, Any] = {c: np.concatenate([getattr(f, c) for f in followed]) for c in columns}
    arrays["answer"] = np.repeat(np.arange(len(followed)), [len(f.accepted) for f in followed])
    np.savez(folder / "held-out.npz", **arrays)
    for path in folder.iterdir():
        path.chmod(0o600)
    sync_tree(folder)


def offer(folder: Path, drafters: Path, name: str) -> None:
    """Move a written candidate to the folder that the server watches. Raises OSError."""
    drafters.mkdir(mode=0o700, exist_ok=True)
    folder.rename(drafters / name)
    sync(drafters)


def prune(drafters: Path, state: ServerState, newest: str, *, keep: str | None = None) -> None:
    """Delete refused candidates, and all but the newest `KEPT` before and after the one in use. keep: the run's first
    drafter, which has its shape."""
    used, there = state.in_use or newest, sorted(os.listdir(drafters))
    older, newer = [n for n in there if n < used], [n for n in there if n > used]
    for name in {*older[:-KEPT], *newer[:-KEPT], *state.refused} - {keep}:
        shutil.rmtree(drafters / name, ignore_errors=True)
