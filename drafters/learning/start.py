"""Make the first drafter of a learner, and its recipe as flags of `outrider train`."""

import argparse
from pathlib import Path

import torch

from .. import networks, registry
from ..block.model import TrainedModel
from ..commands import shapes
from ..commands.arguments import add_arguments
from ..training.forward import frozen_part
from ..training.target import TargetModel

KINDS = tuple(name for name, entry in registry.DRAFTERS.items() if entry.needs_checkpoint and entry.trained)
"""Drafters that can learn."""
FROM_TARGET = "target"
COMMON = "--sequences 1 --anchors 96 --decay-steps 0 --steps 1000000000 --ema 0.998"
GOING_ON = f"{COMMON} --lr 5e-4 --warmup 30 --alpha-ce 0 --alpha-kl 0.3 --kl-falloff 1 --short-steps 0"
FROM_NOTHING = f"{COMMON} --lr 1.2e-3 --warmup 60 --short-block 4 --short-steps 600"


def settings(kind: str, target: TargetModel, start: str) -> argparse.Namespace:
    """Return the learner's flags of `outrider train`. start: a drafter folder, or "target".

    Raises ValueError for a kind that cannot learn.
    """
    if kind not in KINDS:
        raise ValueError(f"learning drafters are {', '.join(KINDS)}, not {kind}")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = (FROM_NOTHING if start == FROM_TARGET else GOING_ON).split()
    return parser.parse_args([kind, "--target", target.path, "--out", ".", "--start", start, *flags])


def first_drafter(
    args: argparse.Namespace, target: TargetModel, counts: torch.Tensor | None, tokens: torch.Tensor
) -> TrainedModel:
    """Return a drafter made of the target's layers, in float32. Raises ValueError if their shape does not allow it.

    counts: [V] frequency of each token in answers; None: lower ids first, the earlier merges of most tokenizers.
    tokens: as in `shapes.fresh_drafter`.
    """
    config = shapes.drafter_config(args, args.kind, target, shapes.target_layers(args.kind, target))
    vocab = None
    if config.draft_vocab_size:
        ranks = -torch.arange(config.vocab_size, dtype=torch.float64) / config.vocab_size
        wanted = ranks if counts is None else counts.double() + 1e-6 * ranks
        vocab = wanted.topk(config.draft_vocab_size).indices.sort().values
    return shapes.fresh_drafter(args, config, target, vocab, tokens)


def write_start(folder: str | Path, target_path: str, kind: str) -> None:
    """Write a target's untrained drafter as a checkpoint folder, which fixes its shape. The first learned drafter may
    have another draft vocabulary of the same size. Raises ValueError and OSError."""
    target = TargetModel.load(target_path)
    args = settings(kind, target, FROM_TARGET)
    model = first_drafter(args, target, None, torch.arange(min(256, target.config.vocab_size)))
    networks.save(model, frozen_part(model, target).head, folder)
