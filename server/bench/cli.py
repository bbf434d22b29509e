"""Measure on this machine.

outrider bench steps    time of one engine step for (requests x tokens) shapes, beside the plain matrix products
  outrider bench accept   accepted length of a drafter on files of prompts
  outrider bench load     throughput and latency by concurrency, planned against unplanned
  outrider bench plan     microseconds per step of each planner
  outrider bench peers    tokens per second of other engines on the same prompts
  outrider bench speed    tokens per second with speculation against without
"""

from __future__ import annotations

import argparse
import importlib

# name: (module, one line of help); each module has add_arguments(parser) and run(args).
BENCHMARKS = {
    "steps": ("outrider.server.bench.steps", "time of one engine step by shape"),
    "accept": ("outrider.server.bench.accept", "accepted length and acceptance by position of a drafter"),
    "load": ("outrider.server.bench.load", "throughput and latency by concurrency, planned against unplanned"),
    "plan": ("outrider.server.bench.plan", "microseconds per step of each planner"),
    "peers": ("outrider.server.bench.peers", "tokens per second of other engines on the same prompts"),
    "speed": ("outrider.server.bench.speed", "tokens per second with speculation against without"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, (module_name, summary) in BENCHMARKS.items():
        module = importlib.import_module(module_name)
        subparser = subparsers.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(run_benchmark=module.run)


def run(args: argparse.Namespace) -> int:
    return int(args.run_benchmark(args) or 0)
