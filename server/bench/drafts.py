"""Time of a draft beside the verification that it is for, by requests in a batch; no server.

The verification is a decode step of the target on the kernels alone, gamma + 1 tokens a request: an engine around it
takes longer, so that a draft's share there is smaller than here. Drafting, and observing what a step commits, are timed
with the compiled kernels and in plain torch. All take turns, round by round; quartiles follow the median of a share.
The parts are those of the compiled draft: what its operations took, and the rest. With one thread times are its
processor time, which a busy machine disturbs least, otherwise wall-clock time.

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
from outrider.kernels.blocks import KINDS
from outrider.kernels.cpu import native
from outrider.server.bench import harness
from outrider.server.bench.kernel_step import OURS, Model, Shape, blocks_of
from outrider.server.engine.checkpoints import WEIGHTS
from outrider.server.errors import UserError

PARTS = ("products", "attention", "norms, rope", "sampling")
"""As the kernels' stopwatch names them."""
Arms = dict[str, Callable[[], object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shipped = sorted(path.parent for path in WEIGHTS.glob("*/*/config.json"))
    add("drafters", nargs="*", type=Path, default=shipped, metavar="FOLDER", help="(default: the shipped ones)")
    add("--requests", default="1,2,4,8,16,32", metavar="N,…", help="in a batch (default: %(default)s)")
    add("--context", type=int, default=300, metavar="N", help="tokens in the cache of each (default: %(default)s)")
    add("--committed", type=int, default=3, metavar="N", help="tokens a request and step (default: %(default)s)")
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
    results: dict[str, Any] = {}
    for folder in args.drafters:
        try:
            drafter = _drafter(folder, max(counts), args.context)
            target = _target(drafter.model.config, args.weights)
        except ValueError as error:  # a CheckpointError, or a kind whose blocks do not fit the target's shape
            raise UserError(str(error)) from None
        print(f"\n{folder.name:>9}{'':>9}{'propose':>9}{'':9}{'observe':>9}{'':9}   share of verification")
        print(
            f"{'requests':>9}{'verify':>9}{'torch':>9}{'ours':>9}{'torch':>9}{'ours':>9}   "
            f"{'torch':25}{'ours':25}parts of ours"
        )
        for requests in counts:
            times, parts = measure(_arms(drafter, target, requests, args), args.rounds, clock)
            results[f"{folder.name}, {requests}"] = {"times": times, "parts": parts}
            print(_line(requests, times, parts), flush=True)
    harness.write_json(args.json, results)
    return 0


def _drafter(folder: Path, requests: int, context: int) -> BlockDrafter:
    """The drafter of a folder beside a target with random weights, room for `requests` of them behind `context`."""
    model = load(folder)
    config = model.config
    embedding, head = torch.randn(2, config.vocab_size, config.hidden_size).mul_(0.1).bfloat16()
    drafter = BlockDrafter(model, embedding=embedding, head=head)
    drafter.allocate(requests * (context + drafter.gamma + 1))
    return drafter


def _target(config: BlockConfig, weights: str) -> Model:
    """The target, as far as a drafter's config tells: its layers are taken to have the shape of the drafter's."""
    shape = Shape(
        config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size,
        config.vocab_size, config.num_target_layers,
    )  # fmt: skip
    return Model(shape, torch.bfloat16, OURS if weights == "bfloat16" else blocks_of(weights))


def _arms(drafter: BlockDrafter, target: Model, requests: int, args: argparse.Namespace) -> Arms:
    config, width = drafter.model.config, args.context + drafter.gamma + 1
    table = torch.randperm(requests * width).int().view(requests, width)
    batch = DraftBatch(
        anchors=torch.randint(config.vocab_size, (requests,)),
        seq_lens=torch.full((requests,), args.context),
        page_table=table,
        rows=torch.arange(requests),
        temperatures=torch.full((requests,), args.temperature),
        keys=torch.randint(2**62, (requests, drafter.gamma)),
    )
    slots = table[:, args.context : args.context + args.committed].flatten().long()
    positions = torch.arange(args.context, args.context + args.committed).repeat(requests)
    hidden = torch.randn(len(slots), len(config.target_layers) * config.hidden_size).bfloat16()
    features = Features(hidden, torch.zeros_like(slots), positions, slots)
    arms: Arms = {"verify": target.step(requests, drafter.gamma + 1, width)}
    for name in "ours", "torch":
        arms[f"propose, {name}"] = partial(_as, name, drafter, drafter.propose, batch)
        arms[f"observe, {name}"] = partial(_as, name, drafter, drafter.observe, features)
    return arms


def measure(arms: Arms, rounds: int, clock: Callable[[], float]) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Milliseconds of each arm, one per round, and what the operations of one more draft of ours took."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    parts = []
    for arm in arms.values():
        arm()
    for number in range(rounds):
        for name in harness.rotated(list(arms), number):
            start = clock()
            arms[name]()
            times[name].append((clock() - start) * 1e3)
        torch.ops.outrider.time_spent(True)
        arms["propose, ours"]()
        parts.append([seconds * 1e3 for seconds in torch.ops.outrider.time_spent(False)])
    return times, parts


def _line(requests: int, times: dict[str, list[float]], parts: list[list[float]]) -> str:
    verify, ours = times["verify"], times["propose, ours"]
    cells = [f"{requests:9}"]
    for name in ("verify", "propose, torch", "propose, ours", "observe, torch", "observe, ours"):
        cells.append(f"{median(times[name]):9.2f}")
    for name in ("torch", "ours"):
        shares = [a / b for a, b in zip(times[f"propose, {name}"], verify, strict=True)]
        low, middle, high = quantiles(shares, n=4) if len(shares) > 1 else shares * 3
        cells.append(f"   {middle:.3f} ({low:.3f} .. {high:.3f})")
    taken = [median(part) for part in zip(*parts, strict=True)]
    named = [f"{name} {part:.2f}" for name, part in zip(PARTS, taken, strict=True)]
    return "".join(cells) + "   " + ", ".join([*named, f"rest {median(ours) - sum(taken):.2f}"])


def _as(name: str, drafter: BlockDrafter, call: Callable[[Any], object], what: Any) -> object:
    """The call with the compiled block, or in plain torch."""
    compiled = drafter.compiled
    drafter.compiled = compiled if name == "ours" else None
    try:
        return call(what)
    finally:
        drafter.compiled = compiled
