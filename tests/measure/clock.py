"""Threads and the clock of the micro benchmarks, and arms that take turns."""

import argparse
import time
from collections.abc import Callable, Mapping

import torch

from outrider.kernels.cpu import native
from outrider.server.bench import harness

Arm = Callable[[], object]
Clock = Callable[[], float]


def add_flags(parser: argparse.ArgumentParser, threads: int) -> None:
    add = parser.add_argument
    clock = "with one, times are its processor time, which a busy machine disturbs least; else wall-clock time"
    add("--threads", type=int, default=threads, metavar="N", help=f"{clock} (default: %(default)s)")
    add("--rounds", type=int, default=9, metavar="N", help="measurements of each case (default: %(default)s)")
    harness.add_output_flags(parser)


def start(args: argparse.Namespace, about: str) -> Clock:
    """Check the flags, set and print the number of threads; returns the clock, in seconds."""
    harness.check_positive(args, "threads", "rounds")
    harness.check_outputs(args)
    torch.set_num_threads(args.threads)
    print(f"instruction set {native.instruction_set()}, {about}, {args.threads} thread(s), milliseconds")
    return time.thread_time if args.threads == 1 else time.perf_counter


def measure(arms: Mapping[str, Arm], rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Milliseconds per call, one per round, arms in turns; short arms repeat for about a millisecond."""
    repeats = {}
    for name, arm in arms.items():
        arm()
        start = clock()
        arm()
        repeats[name] = max(1, int(1e-3 / max(clock() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in harness.rotated(list(arms), number):
            start = clock()
            for _ in range(repeats[name]):
                arms[name]()
            times[name].append((clock() - start) / repeats[name] * 1e3)
    return times
