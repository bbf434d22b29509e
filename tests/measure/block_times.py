"""Times products with weights in blocks, with exact activations and with activations rounded to 8 bits: ms by rows.

Both take turns, round by round, with a loop that only reads the weight's bytes, since a product of one row can hardly
be faster ("of reading": the loop's time over the product's). Weights are random.

examples:
  python tests/measure/block_times.py
  python tests/measure/block_times.py --kinds Q6_K --shape 151936x1024 --rows 1,8
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from timeit import Timer

import script
import torch

from outrider.kernels import blocks, linear
from outrider.kernels.cpu import native
from outrider.server.bench import harness, record
from outrider.server.errors import UserError

OFFERED = [kind for kind in blocks.KINDS if not kind.startswith("GROUPS_")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kinds", nargs="+", choices=OFFERED, default=["Q4_K", "Q6_K"], help="types of weights (default: Q4_K Q6_K)")
    add("--shape", default="262144x1024", metavar="OUTPUTSxDEPTH", help="of the weight (default: %(default)s)")
    add("--rows", default="1,2,3,4,6,8,16,32,64", metavar="LIST", help="rows of the products (default: %(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="number format (default: %(default)s)")
    clock = "with one, times are its processor time, which a busy machine disturbs least; else wall-clock time"
    add("--threads", type=int, default=2, metavar="N", help=f"{clock} (default: %(default)s)")
    add("--rounds", type=int, default=9, metavar="N", help="measurements of each case (default: %(default)s)")
    harness.add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    rows, (outputs, depth) = harness.positive_integers("--rows", args.rows), shape_of(args.shape)
    if not native.available():
        raise UserError("weights in blocks are multiplied by the compiled kernels, which do not run here")
    harness.check_positive(args, "threads", "rounds")
    harness.check_outputs(args)
    torch.set_num_threads(args.threads)
    about = f"{args.shape} {args.dtype}, {args.threads} thread(s), milliseconds"
    print(f"instruction set {native.instruction_set()}, {about}")
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print(f"{'weight, rows':16}{'reading':>10}{'float':>10}{'int8':>10}{'float/int8':>20}{'of reading':>12}")
    results = {}
    for kind in args.kinds:
        raw = random_blocks(kind, outputs, depth)
        weights = {name: blocks.pack_blocks(raw, kind, outputs, depth, activations=name) for name in blocks.ACTIVATIONS}
        words = raw.flatten()[: raw.numel() // 8 * 8].view(torch.int64)
        for count in rows:
            x = torch.randn(count, depth).to(getattr(torch, args.dtype))
            arms = {"reading": words.sum} | {n: partial(linear.packed_linear, x, w) for n, w in weights.items()}
            times = results[f"{kind} {count}"] = measured(arms, args.rounds, clock)
            columns = "".join(f"{median(arm):10.2f}" for arm in times.values())
            faster, share = (harness.ratio(times[arm], times["int8"]) for arm in ("float", "reading"))
            print(f"{f'{kind} {count}':16}{columns}{faster.cell:>20}{share.median:12.2f}", flush=True)
    record.write(args.json, "micro blocks", results)
    return 0


def measured(
    arms: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds per call, one per round, arms in turns; short arms repeat for about a millisecond."""
    timers = {name: Timer(arm, timer=clock) for name, arm in arms.items()}
    repeats = {name: max(1, int(1e-3 / max(timer.repeat(2, 1)[1], 1e-6))) for name, timer in timers.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in harness.rotated(list(arms), number):
            times[name].append(timers[name].timeit(repeats[name]) / repeats[name] * 1e3)
    return times


def shape_of(text: str) -> tuple[int, int]:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes) or int(sizes[1]) % 256:
        raise UserError(f"--shape is OUTPUTSxDEPTH, a depth of whole superblocks of 256, not {text}")
    return int(sizes[0]), int(sizes[1])


def random_blocks(kind: str, outputs: int, depth: int) -> torch.Tensor:
    """Random blocks with scales about 0.001: [outputs, bytes of a row]."""
    raw = torch.randint(0, 256, (outputs, depth // blocks.block_depth(kind), blocks.KINDS[kind]), dtype=torch.uint8)
    scale = torch.tensor([1e-3], dtype=torch.float16).view(torch.uint8)
    at = blocks.SCALES_AT.get(kind, 0)
    for place in [] if kind == "MXFP4" else [at, at + 2] if kind in blocks.MINIMA else [at]:
        raw[..., place : place + 2] = scale
    if kind == "MXFP4":
        raw[..., 0] = 118
    return raw.flatten(1)


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
