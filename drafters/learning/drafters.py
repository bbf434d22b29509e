"""The drafters of a learner's folder: loaded, saved, and followed along answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from .. import networks
from ..block.model import TrainedModel
from ..commands import train
from ..diffusion.denoise import Schedule
from ..training.batches import BatchMaker
from ..training.forward import frozen_part
from ..training.store import Sequence
from ..training.target import TargetModel
from ..training.validate import drafts_of
from .gate import Followed, follow
from .start import FROM_TARGET


class Drafters:
    """The drafter that the server started with, named None, and the candidates by their names."""

    def __init__(self, args: argparse.Namespace, target: TargetModel) -> None:
        self.args, self.target, self.candidates = args, target, Path(args.folder) / "drafters"
        self._followed: dict[str | None, dict[str, Followed]] = {}

    def folder_of(self, name: str | None) -> Path | None:
        """A drafter's folder, that of the first one where a learned one is gone; None for none yet."""
        if name and (self.candidates / name / "config.json").exists():
            return self.candidates / name
        return None if self.args.start == FROM_TARGET else Path(self.args.start)

    def load(self, folder: Path, dtype: torch.dtype | None = None) -> TrainedModel:
        """The drafter of a folder, in the target's dtype or another."""
        model = train.read_drafter(folder, self.args.kind, self.target)
        return model.to(device=self.target.device, dtype=dtype or self.target.embedding.dtype)

    def save(self, model: TrainedModel, folder: Path) -> None:
        networks.save(model, frozen_part(model, self.target).head, folder)

    def schedule(self, model: TrainedModel) -> Schedule | None:
        """The steps in which one that denoises drafts; None for others."""
        args = self.args
        return train.schedule_of(args.kind, model.config.gamma, args.denoising_steps, args.denoising_order)

    def follow(self, folder: Path, sequences: Iterable[Sequence]) -> list[Followed]:
        """Follow answers with the drafter of a folder."""
        model = self.load(folder)
        drafts = drafts_of(model, frozen_part(model, self.target), self.schedule(model))
        return follow(drafts, BatchMaker(model.config, model.vocab, device=self.target.device), sequences)

    def follow_once(self, name: str | None, answers: Mapping[str, Callable[[], Sequence]]) -> list[Followed] | None:
        """Answers by digest, followed by this drafter, each once; None where there is none in use."""
        if (folder := self.folder_of(name)) is None:
            return None
        kept = self._followed.setdefault(name, {})
        if missing := [digest for digest in answers if digest not in kept]:
            made = self.follow(folder, (answers[digest]() for digest in missing))
            kept.update(zip(missing, made, strict=True))
        return [kept[digest] for digest in answers]

    def forget_but(self, *names: str | None) -> None:
        """Forget what others than these have followed."""
        self._followed = {name: kept for name, kept in self._followed.items() if name in names}
