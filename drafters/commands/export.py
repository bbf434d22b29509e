"""`outrider export`: a drafter in another storage, the mean of several, or a delta merged into its target."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..block import checkpoint
from ..block.model import DraftModel
from ..conversion import delta
from ..eagle.config import EagleConfig
from ..networks import kind_of, load_any
from ..training.loop import checkpoint_model


def mean_drafter(paths: list[Path]) -> DraftModel:
    """The float32 drafter in a folder or a run's checkpoint; of several, the mean of their weights.

    Runs that part from the same weights end in one basin, whose middle is often lower than they are (Wortsman et al.,
    "Model soups", 2022). Raises ValueError where they are not of one shape and vocabulary.
    """
    first, *others = (
        checkpoint_model(path) if path.is_file() else load_any(path, dtype=torch.float32) for path in paths
    )
    for path, other in zip(paths[1:], others, strict=True):
        if other.config != first.config or not torch.equal(other.vocab, first.vocab):
            raise ValueError(f"{path} is not of the same shape and draft vocabulary as {paths[0]}")
    with torch.no_grad():
        for weight, *more in zip(first.parameters(), *(other.parameters() for other in others), strict=True):
            weight.copy_(torch.stack([weight, *more]).mean(0))
    return first


def export(args: argparse.Namespace) -> int:
    """Write a drafter in another storage, or a delta merged into its target; returns the exit status."""
    if args.target:
        if len(args.drafter) > 1:
            raise ValueError("--target takes one delta")
        delta.write_merged(args.target, args.drafter[0], args.out)
        print(f"wrote {args.out}")
        return 0
    for path in args.drafter:
        if path.is_dir() and kind_of(path) == EagleConfig.kind:
            raise ValueError(f"{path}: nothing to export, stock SGLang loads an EAGLE-3 folder as it is")
    model = mean_drafter(args.drafter)
    if args.storage == "int8":
        checkpoint.save_compact(model, args.out)
    else:
        checkpoint.save_plain(model, args.out)
    print(f"wrote {args.out} ({checkpoint.stored_bytes(args.out) / 1e6:.1f} MB)")
    return 0
