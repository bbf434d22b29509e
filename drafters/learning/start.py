"""The drafter that a learner starts from, and its recipe, as flags of `outrider train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from .. import networks, registry
from ..block.model import BlockModel, TrainedModel
from ..commands import shapes, train
from ..commands.arguments import DIFFUSION_STAGES, add_arguments
from ..diffusion.denoise import Schedule, make_schedule
from ..diffusion.model import DiffusionModel
from ..eagle.config import EagleConfig
from ..eagle.model import EagleModel
from ..training.diffusion import DiffusionRun
from ..training.forward import frozen_part
from ..training.loop import DraftRun, Run
from ..training.start import start_diffusion, start_eagle, start_from_target
from ..training.store import FeatureStore
from ..training.target import TargetModel

KINDS = tuple(name for name in registry.names() if registry.find(name).needs_checkpoint and registry.find(name).trained)
"""Drafters that are learned."""
FROM_TARGET = "target"
COMMON = "--sequences 1 --anchors 96 --decay-steps 0 --steps 1000000000 --ema 0.998"
GOING_ON = f"{COMMON} --lr 5e-4 --warmup 30 --alpha-ce 0 --alpha-kl 0.3 --kl-falloff 1 --short-steps 0"
FROM_NOTHING = f"{COMMON} --lr 1.2e-3 --warmup 60 --short-block 4 --short-steps 600"


def settings(kind: str, target: TargetModel, start: str) -> argparse.Namespace:
    """The flags of `outrider train` that the learner trains by; start: a drafter folder, or "target".

    Raises ValueError for a kind that is not learned.
    """
    if kind not in KINDS:
        raise ValueError(f"learning drafters are {', '.join(KINDS)}, not {kind}")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = (FROM_NOTHING if start == FROM_TARGET else GOING_ON).split()
    return parser.parse_args([kind, "--target", target.path, "--out", ".", "--start", start, *flags])


def fresh_drafter(
    args: argparse.Namespace, target: TargetModel, counts: torch.Tensor | None, tokens: torch.Tensor
) -> TrainedModel:
    """A drafter of the target's layers, in float32; raises ValueError where their shape does not allow it.

    counts: [V] how often each token is wanted in drafts; None: lower ids first, the earlier merges of most tokenizers.
    tokens: [S] a text, by which the sizes of queries and keys are measured.
    """
    layers = target_layers(args.kind, target)
    config: Any
    if args.kind == EagleConfig.kind:
        config = shapes.make_eagle_config(args, target, layers)
    else:
        config = shapes.make_config(args, registry.find(args.kind).kind or args.kind, target, layers)
    vocab = None
    if config.draft_vocab_size:
        ranks = -torch.arange(config.vocab_size, dtype=torch.float64) / config.vocab_size
        wanted = ranks if counts is None else counts.double() + 1e-6 * ranks
        vocab = wanted.topk(config.draft_vocab_size).indices.sort().values
    torch.manual_seed(args.seed)
    if args.kind == EagleConfig.kind:
        head = EagleModel.fresh(config, vocab)
        start_eagle(head, target)
        return head
    if args.kind in DIFFUSION_STAGES:
        denoiser = DiffusionModel(config, vocab)
        start_diffusion(denoiser, target, train.start_layers(args, config, target))
        return denoiser
    model = BlockModel(config, vocab)
    start_from_target(model, target, tokens)
    return model


def target_layers(kind: str, target: TargetModel) -> tuple[int, ...]:
    """Layers of the target that a fresh drafter reads."""
    return () if kind in DIFFUSION_STAGES else shapes.spread_layers(target.config.num_hidden_layers, kind)


def write_start(folder: str | Path, target_path: str, kind: str) -> None:
    """Write the untrained drafter of a target as a checkpoint folder, for its shape; the first one that is learned may
    draft from other tokens, but as many. Raises ValueError and OSError."""
    target = TargetModel.load(target_path)
    args = settings(kind, target, FROM_TARGET)
    model = fresh_drafter(args, target, None, torch.arange(min(256, target.config.vocab_size)))
    networks.save(model, frozen_part(model, target).head, folder)


def make_run(
    args: argparse.Namespace, folder: Path, model: TrainedModel, target: TargetModel, schedule: Schedule | None
) -> DraftRun[Any]:
    """The training run of a drafter; DEER, whose stage I only prepares for stage II, goes on with the latter."""
    frozen, recipe = frozen_part(model, target), train.make_recipe(args, args.kind)
    if isinstance(model, DiffusionModel):
        assert schedule is not None
        alpha = args.refine_alpha if "stage-2" in DIFFUSION_STAGES[args.kind] else None
        return DiffusionRun(folder, model, frozen, recipe, schedule=schedule, alpha=alpha)
    assert isinstance(model, BlockModel | EagleModel)
    return Run(folder, model, frozen, recipe)


def schedule_of(kind: str, gamma: int, steps: int, order: str) -> Schedule | None:
    """The denoising steps of a drafter that denoises; steps: 0 for its own number."""
    wanted = steps or registry.find(kind).denoising_steps
    return make_schedule(order, gamma, min(wanted, gamma)) if wanted else None


def token_counts(store: FeatureStore, numbers: list[int], vocab_size: int) -> torch.Tensor:
    """[V] how often tokens stand in these answers or were likely there."""
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    for number in numbers:
        s = store[number]
        counts.index_add_(0, s.tokens[s.prompt :], torch.ones(len(s.top_ids), dtype=torch.float64))
        counts.index_add_(0, s.top_ids.flatten(), s.top_probs.flatten().double())
    return counts
