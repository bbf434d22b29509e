"""Candidates: numbered folders in `drafters/`, each whole or absent."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.storage.replacing import replace, sync, sync_tree

from ..block.model import TrainedModel
from .answers import ServerState, candidate_names
from .gate import Followed

KEPT = 2
"""Candidates kept that are older than the one in use, to go back to, and that are newer."""


def next_name(learner: Path) -> str:
    """A name that no candidate of this learner had."""
    return f"{1 + max(map(int, candidate_names(learner)), default=0):04}"


@torch.no_grad()
def mixed(first: TrainedModel, trained: TrainedModel, share: float) -> TrainedModel:
    """`first` with weights on the line to those of `trained`, `share` of the way.

    Most of what was learned stays there, and most of what was forgotten comes back (Wortsman et al., Robust fine-tuning
    of zero-shot models, 2022, equation 1). Raises ValueError where the two have other shapes.
    """
    theirs = dict(trained.named_parameters())
    for name, weight in first.named_parameters():
        if name not in theirs or theirs[name].shape != weight.shape:
            raise ValueError(f"{name} is not in both drafters, or has another shape")
        weight.lerp_(theirs[name], share)
    return first


def complete(folder: Path, verdict: dict[str, Any], found: list[Followed]) -> None:
    """Write what the gate saw beside a candidate's weights: gate.json, and held-out.npz, of which a server makes its
    calibration: confidence [N, gamma] float32, accepted and reach [N] int64, as of `Followed`."""
    replace({folder / "gate.json": json.dumps(verdict) + "\n"}, 0o600)
    columns = ("confidence", "accepted", "reach")
    arrays: dict[str, Any] = {c: np.concatenate([getattr(f, c) for f in found]) for c in columns}
    np.savez(folder / "held-out.npz", **arrays)
    for path in folder.iterdir():
        path.chmod(0o600)
    sync_tree(folder)


def offer(folder: Path, drafters: Path, name: str) -> None:
    """Put a candidate that is on the disk where the server looks. Raises OSError."""
    drafters.mkdir(mode=0o700, exist_ok=True)
    folder.rename(drafters / name)
    sync(drafters)


def prune(drafters: Path, state: ServerState, newest: str, *, keep: str | None = None) -> None:
    """Delete candidates that were refused, and all but the last ones before and behind the one in use; keep: the one
    that the run began with, of whose shape it is."""
    used, there = state.in_use or newest, sorted(os.listdir(drafters))
    older, newer = [n for n in there if n < used], [n for n in there if n > used]
    for name in {*older[:-KEPT], *newer[:-KEPT], *state.refused} - {keep}:
        shutil.rmtree(drafters / name, ignore_errors=True)
