"""The drafter that a learner starts from, and its recipe, as flags of `outrider train`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..block import checkpoint
from ..block.config import BLOCK_KINDS
from ..block.model import BlockModel
from ..commands import shapes
from ..commands.arguments import add_arguments
from ..training.start import start_from_target
from ..training.store import FeatureStore
from ..training.target import TargetModel

FROM_TARGET = "target"
COMMON = "--sequences 1 --anchors 96 --decay-steps 0 --steps 1000000000 --ema 0.998"
GOING_ON = f"{COMMON} --lr 5e-4 --warmup 30 --alpha-ce 0 --alpha-kl 0.3 --kl-falloff 1 --short-steps 0"
FROM_NOTHING = f"{COMMON} --lr 1.2e-3 --warmup 60 --short-block 4 --short-steps 600"


def settings(kind: str, target: TargetModel, start: str) -> argparse.Namespace:
    """The flags of `outrider train` that the learner trains by; start: a drafter folder, or "target".

    Raises ValueError for a kind that is not learned.
    """
    if kind not in BLOCK_KINDS:
        raise ValueError(f"learning drafters are {' and '.join(BLOCK_KINDS)}, not {kind}")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = (FROM_NOTHING if start == FROM_TARGET else GOING_ON).split()
    return parser.parse_args([kind, "--target", target.path, "--out", ".", "--start", start, *flags])


def fresh_drafter(
    args: argparse.Namespace, target: TargetModel, counts: torch.Tensor | None, tokens: torch.Tensor
) -> BlockModel:
    """A drafter of the target's last layers, in float32; raises ValueError where their shape does not allow it.

    counts: [V] how often each token is wanted in drafts; None: lower ids first, the earlier merges of most tokenizers.
    tokens: [S] a text, by which the sizes of queries and keys are measured.
    """
    layers = shapes.spread_layers(target.config.num_hidden_layers, args.kind)
    config = shapes.make_config(args, args.kind, target, layers)
    vocab = None
    if config.draft_vocab_size:
        ranks = -torch.arange(config.vocab_size, dtype=torch.float64) / config.vocab_size
        wanted = ranks if counts is None else counts.double() + 1e-6 * ranks
        vocab = wanted.topk(config.draft_vocab_size).indices.sort().values
    torch.manual_seed(args.seed)
    model = BlockModel(config, vocab)
    start_from_target(model, target, tokens)
    return model


def write_start(folder: str | Path, target_path: str, kind: str) -> None:
    """Write the untrained drafter of a target as a checkpoint folder, for its shape; the first one that is learned may
    draft from other tokens, but as many. Raises ValueError and OSError."""
    target = TargetModel.load(target_path)
    args = settings(kind, target, FROM_TARGET)
    text = torch.arange(min(256, target.config.vocab_size))
    checkpoint.save_compact(fresh_drafter(args, target, None, text), folder)


def token_counts(store: FeatureStore, numbers: list[int], vocab_size: int) -> torch.Tensor:
    """[V] how often tokens stand in these answers or were likely there."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for number in numbers:
        s = store[number]
        counts.index_add_(0, s.tokens[s.prompt :], torch.ones(len(s.top_ids), dtype=torch.float64))
        counts.index_add_(0, s.top_ids.flatten(), s.top_probs.flatten().double())
    return counts
