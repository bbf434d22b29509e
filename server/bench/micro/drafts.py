"""Time of a draft beside the verification that it is for, by requests in a batch; no server.

The verification is a decode step of the target on the kernels alone, gamma + 1 tokens a request: an engine around it
takes longer, so that a draft's share there is smaller than here. Observing what a step commits, and the draft that
follows, in which a diffusion drafter encodes what was observed, are timed with the compiled kernels and in plain torch.
All drafters take turns, round by round; quartiles follow the median of a share. The parts are those of the compiled
draft: what its operations took, and the rest. With one thread times are its processor time, which a busy machine
disturbs least, otherwise wall-clock time.

examples:
  outrider bench drafts
  outrider bench drafts runs/dspark/drafter --requests 1,8 --temperature 1 --weights Q4_1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from outrider.drafters.base import DraftBatch, Features
from outrider.drafters.block import BlockConfig, BlockDrafter, load
from outrider.drafters.block.checkpoint import load_as
from outrider.drafters.block.config import BLOCK_KINDS
from outrider.drafters.diffusion import DiffusionDrafter, DiffusionModel
from outrider.drafters.diffusion.drafter import BACKLOG_EACH
from outrider.drafters.registry import DENOISING_ORDERS, find
from outrider.kernels.blocks import KINDS
from outrider.kernels.cpu import native

from ...engine.checkpoints import WEIGHTS
from ...engine.settings import CHECKPOINT_DRAFTERS
from ...errors import UserError
from .. import harness
from .kernel_step import OURS, Model, Shape, blocks_of

PARTS = ("products", "attention", "norms, rope", "sampling")
"""As the kernels' stopwatch names them."""
Arms = dict[str, Callable[[], object]]
Times = dict[str, list[float]]
Parts = dict[str, list[list[float]]]
Measured = BlockDrafter | DiffusionDrafter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kinds = dict.fromkeys(find(name).kind or name for name in CHECKPOINT_DRAFTERS)
    shipped = [path.parent for kind in kinds for path in sorted(WEIGHTS.glob(f"*/{kind}/config.json"))]
    add("drafters", nargs="*", type=Path, default=shipped, metavar="FOLDER", help="(default: the shipped ones)")
    add("--requests", default="1,2,4,8,16,32", metavar="N,…", help="in a batch (default: %(default)s)")
    add("--context", type=int, default=300, metavar="N", help="tokens in the cache of each (default: %(default)s)")
    add("--committed", type=int, default=3, metavar="N", help="tokens a request and step (default: %(default)s)")
    add("--denoising-steps", nargs="+", type=int, default=[1, 2], metavar="N", help="of diffusion drafters")
    add("--denoising-order", choices=DENOISING_ORDERS, default="left", help="of theirs (default: left)")
    add("--temperature", type=float, default=0.0, metavar="T", help="of all requests (default: 0)")
    add("--weights", choices=["bfloat16", *KINDS], default="bfloat16", help="of the target (default: %(default)s)")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="(default: %(default)s)")
    add("--rounds", type=int, default=9, metavar="N", help="measurements of each case (default: %(default)s)")
    harness.add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "context", "committed", "threads", "rounds")
    harness.check_outputs(args)
    counts = harness.positive_integers("--requests", args.requests)
    if not native.available():
        raise UserError("outrider bench drafts times the compiled kernels, which this machine has not")
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print(f"instruction set {native.instruction_set()}, target {args.weights}, {args.threads} thread(s), milliseconds")
    try:
        drafters = {
            name: drafter for folder in args.drafters for name, drafter in _drafters(folder, max(counts), args).items()
        }
        target = _target(next(iter(drafters.values())).model.config, args.weights)
    except ValueError as error:  # a CheckpointError, or a kind whose blocks do not fit the target's shape
        raise UserError(str(error)) from None
    measured = {count: measure(_arms(drafters, target, count, args), args.rounds, clock) for count in counts}
    results: dict[str, Any] = {}
    for name in drafters:
        print(f"\n{name:>9}{'':>9}{'propose':>9}{'':9}{'observe':>9}{'':9}   share of verification")
        print(
            f"{'requests':>9}{'verify':>9}{'torch':>9}{'ours':>9}{'torch':>9}{'ours':>9}   "
            f"{'torch':25}{'ours':25}parts of ours"
        )
        for count, (times, parts) in measured.items():
            own = {arm.removeprefix(f"{name}: "): found for arm, found in times.items() if arm.startswith(f"{name}: ")}
            own["verify"] = times["verify"]
            results[f"{name}, {count}"] = {"times": own, "parts": parts[name]}
            print(_line(count, own, parts[name]), flush=True)
    _print_ratios(list(drafters), measured)
    harness.write_json(args.json, results)
    return 0


def _print_ratios(names: list[str], measured: dict[int, tuple[Times, Parts]]) -> None:
    """A draft of each but the first over the first one's, both with what observing takes."""
    first, *others = names
    if others:
        print(f"\npropose and observe, ours, over those of {first}")
    for name in others:
        for count, (times, _) in measured.items():

            def whole(drafter: str, times: Times = times) -> list[float]:
                both = zip(times[f"{drafter}: propose, ours"], times[f"{drafter}: observe, ours"], strict=True)
                return [propose + observe for propose, observe in both]

            print(f"{name}, {count}: {_quartiles([a / b for a, b in zip(whole(name), whole(first), strict=True)])}")


def _drafters(folder: Path, requests: int, args: argparse.Namespace) -> dict[str, Measured]:
    """The drafter of a folder, a diffusion drafter once with each number of steps, beside a target with random weights
    and with room for `requests`."""
    if BlockConfig.read(folder).kind in BLOCK_KINDS:
        made: dict[str, Measured] = {folder.name: _made(partial(BlockDrafter, load(folder)), requests, args.context)}
        return made
    model = load_as(DiffusionModel, folder)
    return {
        f"{folder.name}, {steps} step{'s' * (steps > 1)}": _made(
            partial(DiffusionDrafter, model, denoising_steps=steps, denoising_order=args.denoising_order),
            requests,
            args.context,
        )
        for steps in args.denoising_steps
    }


def _made(make: Callable[..., Measured], requests: int, context: int) -> Measured:
    config = make.args[0].config  # type: ignore[attr-defined]
    embedding, head = torch.randn(2, config.vocab_size, config.hidden_size).mul_(0.1).bfloat16()
    drafter = make(embedding=embedding, head=head)
    drafter.allocate(requests * (context + drafter.gamma + 1))
    return drafter


def _target(config: BlockConfig, weights: str) -> Model:
    """The target, as far as a drafter's config tells: its layers are taken to have the shape of the drafter's."""
    shape = Shape(
        config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size,
        config.vocab_size, config.num_target_layers,
    )  # fmt: skip
    return Model(shape, torch.bfloat16, OURS if weights == "bfloat16" else blocks_of(weights))


def _arms(drafters: dict[str, Measured], target: Model, requests: int, args: argparse.Namespace) -> Arms:
    first = next(iter(drafters.values()))
    width = args.context + first.gamma + 1
    table = torch.randperm(requests * width).int().view(requests, width)
    arms: Arms = {"verify": target.step(requests, first.gamma + 1, width)}
    for drafter_name, drafter in drafters.items():
        config = drafter.model.config
        batch = DraftBatch(
            anchors=torch.randint(config.vocab_size, (requests,)),
            seq_lens=torch.full((requests,), args.context),
            page_table=table,
            rows=torch.arange(requests),
            temperatures=torch.full((requests,), args.temperature),
            keys=torch.randint(2**62, (requests, drafter.gamma)),
        )

        def observed(start: int, stop: int, config: BlockConfig = config) -> Features:
            slots = table[:, start:stop].flatten().long()
            hidden = torch.randn(len(slots), len(config.target_layers) * config.hidden_size).bfloat16()
            return Features(hidden, torch.zeros_like(slots), torch.arange(start, stop).repeat(requests), slots)

        drafter.observe(observed(0, args.context))
        for _ in range(-(-args.context // BACKLOG_EACH)):  # until a diffusion drafter has encoded all of it
            drafter.propose(batch)
        last = observed(args.context - args.committed, args.context)
        for name in "ours", "torch":
            arms[f"{drafter_name}: observe, {name}"] = partial(_as, name, drafter, drafter.observe, last)
            arms[f"{drafter_name}: propose, {name}"] = partial(_as, name, drafter, drafter.propose, batch)
    return arms


def measure(arms: Arms, rounds: int, clock: Callable[[], float]) -> tuple[Times, Parts]:
    """Milliseconds of each arm, one per round, and of each drafter what the operations of its drafts by ours took.

    A draft follows what it has to observe, and the drafters take turns.
    """
    times: Times = {name: [] for name in arms}
    parts: Parts = {}
    groups: dict[str, list[str]] = {}
    for name in arms:
        groups.setdefault(name.rpartition(", ")[2] + name.partition(":")[0] if ":" in name else name, []).append(name)
    for arm in arms.values():
        arm()
    for number in range(rounds):
        for group in harness.rotated(list(groups), number):
            for name in groups[group]:
                stopwatch = name.endswith("propose, ours")
                if stopwatch:
                    torch.ops.outrider.time_spent(True)
                start = clock()
                arms[name]()
                times[name].append((clock() - start) * 1e3)
                if stopwatch:
                    spent = [seconds * 1e3 for seconds in torch.ops.outrider.time_spent(False)]
                    parts.setdefault(name.partition(":")[0], []).append(spent)
    return times, parts


def _line(requests: int, times: Times, parts: list[list[float]]) -> str:
    verify, ours = times["verify"], times["propose, ours"]
    cells = [f"{requests:9}"]
    for name in ("verify", "propose, torch", "propose, ours", "observe, torch", "observe, ours"):
        cells.append(f"{median(times[name]):9.2f}")
    for name in ("torch", "ours"):
        shares = [a / b for a, b in zip(times[f"propose, {name}"], verify, strict=True)]
        cells.append(f"   {_quartiles(shares)}")
    taken = [median(part) for part in zip(*parts, strict=True)]
    named = [f"{name} {part:.2f}" for name, part in zip(PARTS, taken, strict=True)]
    return "".join(cells) + "   " + ", ".join([*named, f"rest {median(ours) - sum(taken):.2f}"])


def _quartiles(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.3f} ({low:.3f} .. {high:.3f})"


def _as(name: str, drafter: Measured, call: Callable[[Any], object], what: Any) -> object:
    """The call with the compiled block, or in plain torch."""
    compiled = drafter.compiled
    drafter.compiled = compiled if name == "ours" else None
    try:
        return call(what)
    finally:
        drafter.compiled = compiled
