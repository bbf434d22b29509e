"""Time of a draft beside the verification that it is for, by requests in a batch; no server.

The verification is a decode step of the target on the kernels alone, gamma + 1 tokens a request: an engine around it
takes longer, so that a draft's share there is smaller than here. Observing what a step commits, and the draft that
follows, in which a diffusion drafter encodes what was observed, are timed with the compiled kernels and in plain torch.
All drafters take turns, round by round; quartiles follow the median of a share. The parts are those of the compiled
draft: what its operations took, and the rest. With one thread times are its processor time, which a busy machine
disturbs least, otherwise wall-clock time.

examples:
  outrider bench micro drafts
  outrider bench micro drafts runs/dspark/drafter --requests 1,8 --temperature 1 --weights Q4_1
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider.drafters.base import DraftBatch, Features
from outrider.drafters.block import BlockConfig, BlockDrafter, load
from outrider.drafters.block.checkpoint import load_as
from outrider.drafters.block.config import READING_KINDS
from outrider.drafters.diffusion import DiffusionDrafter, DiffusionModel
from outrider.drafters.eagle import EagleConfig, EagleDrafter
from outrider.drafters.eagle import checkpoint as eagle
from outrider.drafters.encoding import BACKLOG_EACH
from outrider.drafters.networks import kind_of
from outrider.drafters.registry import DENOISING_ORDERS, find
from outrider.kernels.blocks import KINDS
from outrider.kernels.cpu import native

from ...errors import UserError
from ...settings.checkpoints import WEIGHTS
from ...settings.declared import CHECKPOINT_DRAFTERS
from .. import harness, record
from . import timing
from .kernel_step import OURS, Model, Shape, blocks_of

PARTS = ("products", "attention", "norms, rope", "sampling")
"""Names that the kernels' stopwatch uses."""
Drafter = BlockDrafter | DiffusionDrafter | EagleDrafter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kinds = dict.fromkeys(find(name).kind or name for name in CHECKPOINT_DRAFTERS)
    shipped = [path.parent for kind in kinds for path in sorted(WEIGHTS.glob(f"*/{kind}/config.json"))]
    add("drafters", nargs="*", type=Path, default=shipped, metavar="FOLDER", help="folders (default: the shipped ones)")
    add("--requests", default="1,2,4,8,16,32", metavar="N,…", help="requests in a batch (default: %(default)s)")
    add("--context", type=int, default=300, metavar="N", help="tokens in the cache of each (default: %(default)s)")
    add("--committed", type=int, default=3, metavar="N", help="tokens a request and step (default: %(default)s)")
    add("--denoising-steps", nargs="+", type=int, default=[1, 2], metavar="N", help="denoising steps (default: 1 2)")
    add("--denoising-order", choices=DENOISING_ORDERS, default="left", help="their order (default: left)")
    add("--temperature", type=float, default=0.0, metavar="T", help="temperature of all requests (default: 0)")
    add("--weights", choices=["bfloat16", *KINDS], default="bfloat16", help="target storage (default: %(default)s)")
    timing.add_flags(parser, torch.get_num_threads())


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "context", "committed")
    counts = harness.positive_integers("--requests", args.requests)
    if not native.available():
        raise UserError("outrider bench micro drafts times the compiled kernels, which this machine has not")
    clock = timing.start(args, f"target {args.weights}")
    try:
        drafters = {name: drafter for folder in args.drafters for name, drafter in _drafters(folder, args).items()}
        slots = max(counts) * _width(drafters, args.context)
        for drafter in drafters.values():
            drafter.allocate(slots)
        target = _target(_config(next(iter(drafters.values()))), args.weights)
    except ValueError as error:  # a CheckpointError, or a kind whose blocks do not fit the target's shape
        raise UserError(str(error)) from None
    found = {count: _Case(drafters, target, count, args).measure(args.rounds, clock) for count in counts}
    results = {f"{name}, {count}": found[count][name] for name in drafters for count in counts}
    print(f"{'':>34}{'verify':>9}{'propose':>9}{'observe':>9}   share of verification; parts of ours")
    for name, measured in results.items():
        times = measured["times"]
        for kind in "torch", "ours":
            draft = times[f"propose, {kind}"]
            low, middle, high = timing.quartiles(draft, times["verify"])
            cells = [median(times["verify"]), median(draft), median(times[f"observe, {kind}"])]
            line = f"{f'{name}, {kind}':>34}" + "".join(f"{cell:9.2f}" for cell in cells)
            print(f"{line}   {middle:.3f} ({low:.3f} .. {high:.3f})", end="\n" if kind == "torch" else "   ")
        taken = [median(part) for part in zip(*measured["parts"], strict=True)]
        named = [f"{part} {spent:.2f}" for part, spent in zip(PARTS, taken, strict=True)]
        print(", ".join([*named, f"rest {median(times['propose, ours']) - sum(taken):.2f}"]), flush=True)
    record.write(args.json, "micro drafts", results, weights={folder.name: folder for folder in args.drafters})
    return 0


def _drafters(folder: Path, args: argparse.Namespace) -> dict[str, Drafter]:
    """The drafter of a folder, a diffusion drafter once with each number of steps, beside a target with random
    weights."""
    made: dict[str, Any] = {}
    kind = kind_of(folder)
    if kind == EagleConfig.kind:
        layers = EagleConfig.read(folder).target_layers
        weights = eagle.load(folder, max(Shape().layers, *(layer + 2 for layer in layers)))
        made[folder.name] = partial(EagleDrafter, weights, gamma=weights.config.gamma)
    elif kind in READING_KINDS:
        made[folder.name] = partial(BlockDrafter, load(folder))
    else:
        model = load_as(DiffusionModel, folder)
        for steps in args.denoising_steps:
            name = f"{folder.name}, {steps} step{'s' * (steps > 1)}"
            options = {"denoising_steps": steps, "denoising_order": args.denoising_order}
            made[name] = partial(DiffusionDrafter, model, **options)
    drafters = {}
    for name, make in made.items():
        config = make.args[0].config
        embedding, head = torch.randn(2, config.vocab_size, config.hidden_size).mul_(0.1).bfloat16()
        drafters[name] = make(embedding=embedding, head=head)
    return drafters


def _width(drafters: Mapping[str, Drafter], context: int) -> int:
    """Positions of a request: its context and the longest draft behind the anchor."""
    return context + 1 + max(drafter.gamma for drafter in drafters.values())


def _config(drafter: Drafter) -> BlockConfig | EagleConfig:
    return drafter.network.config if isinstance(drafter, EagleDrafter) else drafter.model.config


def _target(config: BlockConfig | EagleConfig, weights: str) -> Model:
    """The target, as far as a drafter's config tells: its layers are taken to have the shape of the drafter's. How many
    it has, an EAGLE-3 head's does not say."""
    shape = Shape(
        config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size,
        config.vocab_size, config.num_target_layers if isinstance(config, BlockConfig) else Shape().layers,
    )  # fmt: skip
    return Model(shape, torch.bfloat16, OURS if weights == "bfloat16" else blocks_of(weights))


class _Case:
    """All drafters and the target with one number of requests, whose contexts are in the caches."""

    def __init__(self, drafters: dict[str, Drafter], target: Model, requests: int, args: argparse.Namespace):
        width = _width(drafters, args.context)
        self.drafters, self.table = drafters, torch.randperm(requests * width).int().view(requests, width)
        self.verify = target.step(requests, width - args.context, width)
        self.last: dict[str, Features] = {}
        self.batch: dict[str, DraftBatch] = {}
        for name, drafter in drafters.items():
            self.batch[name] = DraftBatch(
                anchors=torch.randint(_config(drafter).vocab_size, (requests,)),
                seq_lens=torch.full((requests,), args.context),
                page_table=self.table,
                rows=torch.arange(requests),
                temperatures=torch.full((requests,), args.temperature),
                keys=torch.randint(2**62, (requests, drafter.gamma)),
            )
            drafter.observe(self._observed(drafter, 0, args.context))
            for _ in range(-(-args.context // BACKLOG_EACH)):  # until a diffusion drafter has encoded all of it
                drafter.propose(self.batch[name])
            self.last[name] = self._observed(drafter, args.context - args.committed, args.context)

    def _observed(self, drafter: Drafter, start: int, stop: int) -> Features:
        config, slots = _config(drafter), self.table[:, start:stop].flatten().long()
        hidden = torch.randn(len(slots), len(config.target_layers) * config.hidden_size).bfloat16()
        return Features(hidden, torch.zeros_like(slots), torch.arange(start, stop).repeat(len(self.table)), slots)

    def measure(self, rounds: int, clock: timing.Clock) -> dict[str, Any]:
        """Results by drafter: `times`, milliseconds of each arm, one per round, and `parts` of its compiled drafts.

        A draft follows what it has to observe, and the drafters take turns.
        """
        found: dict[str, Any] = {name: {"times": {"verify": []}, "parts": []} for name in self.drafters}
        arms = [(name, kind) for name in self.drafters for kind in ("ours", "torch")]
        for number in range(-1, rounds):  # the first warms up
            start = clock()
            self.verify()
            spent = (clock() - start) * 1e3
            for name, kind in harness.rotated(arms, number + 1):
                times = self._draft(name, kind, clock)
                if number < 0:
                    continue
                if kind == "ours":
                    found[name]["times"]["verify"].append(spent)
                    found[name]["parts"].append(times.pop("parts"))
                for call, seconds in times.items():
                    found[name]["times"].setdefault(f"{call}, {kind}", []).append(seconds * 1e3)
        return found

    def _draft(self, name: str, kind: str, clock: timing.Clock) -> dict[str, Any]:
        """Seconds of one observation and the draft that follows, with the compiled block or in plain torch."""
        drafter = self.drafters[name]
        compiled, drafter.compiled = drafter.compiled, drafter.compiled if kind == "ours" else None
        try:
            start = clock()
            drafter.observe(self.last[name])
            observed = clock()
            if kind == "ours":
                torch.ops.outrider.time_spent(True)
            drafter.propose(self.batch[name])
            times: dict[str, Any] = {"observe": observed - start, "propose": clock() - observed}
            if kind == "ours":
                times["parts"] = [seconds * 1e3 for seconds in torch.ops.outrider.time_spent(False)]
        finally:
            drafter.compiled = compiled
        return times
