"""A load test of any OpenAI server by URL: its flags, its run and what it writes."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import pictures
from ...errors import UserError
from ...settings.flags import Flags
from .. import harness, remote
from . import arrivals, generate, report, scenario, workload
from .generate import Record
from .scenario import UNITS, Scenario, Trace
from .summary import Summary, summarise
from .workload import Counting, Workload

URL = "http://127.0.0.1:30000"
OBJECTIVES = ("ttft", "tpot", "e2e")


def add_flags(flags: Flags) -> None:
    add = flags.add_argument
    add("--url", help=f"of an OpenAI server (default with --scenario: {URL})")
    add("--scenario", type=Path, metavar="FILE", help="a load test as a file, see deploy/loadtest; flags win over it")
    add("--api-key", default=os.environ.get("OUTRIDER_API_KEY"), metavar="KEY", help="or OUTRIDER_API_KEY")
    add("--arrivals", choices=["closed", "fixed", "poisson", "bursts", "trace"], help="when requests come")
    add("--rate", metavar="LIST", help="requests per second, for fixed, poisson (default) and bursts")
    add("--burst", type=int, metavar="N", help="requests at once, for bursts")
    add("--trace", type=Path, metavar="FILE", help="replay it: JSON lines with timestamp, input_length, output_length")
    add("--speed", metavar="LIST", help="how much faster the trace is played")
    add("--seconds", type=float, metavar="S", help="measured at each load (default: 60)")
    add("--warm-up", type=float, metavar="S", help="before that, at each load (default: 10)")
    add("--timeout", type=float, metavar="S", help="for one answer (default: 600)")
    add("--input-tokens", type=int, metavar="N", help="made-up prompts of this length instead of --prompts")
    add("--goodput", nargs="+", metavar="NAME:MS", help="what a good answer keeps, like ttft:500 tpot:50 e2e:10000")
    add("--seed", type=int, help="of times, lengths and texts (default: 0)")
    add("--csv", type=Path, metavar="FILE", help="write a row per request there")


def run(args: argparse.Namespace) -> int:
    """Measure at each load in turn; 1 where not one request was answered. Interrupted, what is measured is kept."""
    harness.check_outputs(args)
    test = scenario.read(args.scenario, _changes(args))
    records: dict[float, list[Record]] = {}
    answered = False
    try:
        asyncio.run(_measure(test, args, records))
    finally:
        if records:
            answered = _write(test, args, records)
    return 0 if answered else 1


def _write(test: Scenario, args: argparse.Namespace, records: dict[float, list[Record]]) -> bool:
    """Print and write the loads measured; whether any request was answered."""
    summaries = _summaries(test, records)
    unit = UNITS[test.arrivals.kind]
    print(report.table(summaries, unit))
    harness.write_json(
        args.json, {"scenario": test.model_dump(mode="json"), "loads": [asdict(summary) for summary in summaries]}
    )
    if args.csv:
        report.write_csv(args.csv, records, test.warm_up)
    if args.plot:
        with pictures.figure(args.plot) as figure:
            report.plot(summaries, unit, figure)
    return any(summary.whole for summary in summaries)


async def _measure(test: Scenario, args: argparse.Namespace, records: dict[float, list[Record]]) -> None:
    """Fill `records`, load by load."""
    trace = arrivals.read_trace(test.arrivals.file) if isinstance(test.arrivals, Trace) else []
    async with remote.connect(args.url or URL, args.api_key, args.model) as server:
        counting = await Counting.of(server, test.timeout) if workload.needs_counting(test, trace) else None
        for load in test.arrivals.loads:
            print(f"{server.model} at {load:g} {UNITS[test.arrivals.kind]}", file=sys.stderr, flush=True)
            records[load] = await generate.at_load(server, test, Workload(test, counting), trace, load)


def _summaries(test: Scenario, records: dict[float, list[Record]]) -> list[Summary]:
    return [summarise(of_load, load, test.warm_up, test.seconds, test.objectives) for load, of_load in records.items()]


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, in the shape of a scenario; paths from where the command runs."""
    changes: dict[str, Any] = {}
    for name in ("seconds", "warm_up", "timeout", "seed"):
        if (value := getattr(args, name)) is not None:
            changes[name] = value
    if said := _arrivals(args):
        changes["arrivals"] = said
    requests: dict[str, Any] = {}
    if args.prompts:
        requests["prompts"] = [str(path.absolute()) for path in args.prompts]
    if args.input_tokens is not None:
        requests |= {"input_tokens": args.input_tokens, "prompts": []}
    if args.new_tokens is not None:
        requests["output_tokens"] = args.new_tokens
    if requests:
        changes["requests"] = [requests]
    if args.temperature is not None:
        changes["body"] = {"temperature": args.temperature}
    if args.goodput:
        changes["objectives"] = _objectives(args.goodput)
    return changes


def _arrivals(args: argparse.Namespace) -> dict[str, Any]:
    if sum(given is not None for given in (args.concurrency, args.rate, args.trace)) > 1:
        raise UserError("--concurrency, --rate and --trace exclude each other")
    said: dict[str, Any] = {}
    if args.concurrency is not None:
        said |= {"kind": "closed", "concurrency": harness.positive_integers("--concurrency", args.concurrency)}
    if args.rate is not None:
        said |= {"kind": "poisson", "rate": harness.numbers_from_zero("--rate", args.rate)}
    if args.burst is not None:
        said |= {"kind": "bursts", "size": args.burst}
    if args.trace is not None:
        said |= {"kind": "trace", "file": str(args.trace.absolute())}
    if args.speed is not None:
        said |= {"kind": "trace", "speed": harness.numbers_from_zero("--speed", args.speed)}
    return said if args.arrivals is None else said | {"kind": args.arrivals}


def _objectives(words: list[str]) -> dict[str, float]:
    found = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            milliseconds = float(number)
        except ValueError:
            milliseconds = 0.0
        if name not in OBJECTIVES or not milliseconds > 0:
            raise UserError(f"--goodput takes ttft:MS, tpot:MS and e2e:MS with milliseconds above 0, not {word!r}")
        found[name] = milliseconds
    return found
