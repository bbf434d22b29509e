"""A load test of OpenAI servers by URL: flags, run and output. Several servers take turns."""

import argparse
import asyncio
import math
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...settings.flags import Flags
from .. import harness, record, remote, server_processes
from ..server_processes import LEARNER
from . import arrivals, generate, report, scenario, workload
from .generate import Record
from .scenario import UNITS, Scenario, Trace
from .summary import Results, summarise
from .workload import Counting, Workload

URL = "http://127.0.0.1:30000"
ROUNDS = 3
"""Rounds of several servers; one server has a single round."""
LEARNER_SECONDS = 2.0
"""Pause before the turn of a server that learns, so that its learner, stopped in other turns, runs again."""
Turn = tuple[float, str, int]
"""Load, arm and round."""
OBJECTIVES = ("ttft", "tpot", "e2e")
UNDRAFTED = {"speculation": {"enabled": False}}


@dataclass(slots=True)
class Measured:
    """Requests and the server's processor seconds by turn; process memory (MB) and file name of its model by arm; the
    arms that learn.

    Processor time, memory and learning are known only of servers on this machine.
    """

    records: dict[Turn, list[Record]] = field(default_factory=dict)
    processor: dict[Turn, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    learning: list[str] = field(default_factory=list)


def add_flags(flags: Flags) -> None:
    add = flags.add_argument
    add(
        "--url",
        nargs="+",
        metavar="[NAME=]URL",
        help=f"address of an OpenAI server, or of several that take turns (default with --scenario: {URL})",
    )
    add("--undrafted", nargs="+", default=[], metavar="NAME", help="names of --url whose requests turn speculation off")
    add("--scenario", type=Path, metavar="FILE", help="a load test as a file, see deploy/loadtest; flags win over it")
    add("--api-key", default=os.environ.get("OUTRIDER_API_KEY"), metavar="KEY", help="key (default: OUTRIDER_API_KEY)")
    add("--arrivals", choices=["closed", "fixed", "poisson", "bursts", "trace"], help="when requests come")
    add("--rate", metavar="LIST", help="requests per second, for fixed, poisson (default) and bursts")
    add("--burst", type=int, metavar="N", help="requests at once, for bursts")
    add("--trace", type=Path, metavar="FILE", help="replay it: JSON lines with timestamp, input_length, output_length")
    add("--speed", metavar="LIST", help="how much faster the trace is played")
    add("--seconds", type=float, metavar="S", help="seconds measured at each load (default: 60)")
    add("--warm-up", type=float, metavar="S", help="seconds before that, at each load (default: 10)")
    add("--timeout", type=float, metavar="S", help="seconds for one answer (default: 600)")
    add("--input-tokens", type=int, metavar="N", help="made-up prompts of this length instead of --prompts")
    add("--goodput", nargs="+", metavar="NAME:MS", help="times in ms that a good answer keeps, like ttft:500 tpot:50")
    add("--seed", type=int, metavar="N", help="seed of times, lengths and texts (default: 0)")
    add("--csv", type=Path, metavar="FILE", help="write a row per request there")


def run(args: argparse.Namespace) -> Results:
    """Measure at each load in turn. An interruption still prints and writes the results so far."""
    test = scenario.read(args.scenario, _changes(args))
    measured = Measured()
    try:
        asyncio.run(_measure(test, args, measured))
    finally:
        results = _write(test, args, measured)
    return results


def urls(args: argparse.Namespace) -> dict[str, str]:
    """Addresses by arm; raises UserError if two arms have the same name or --undrafted names no arm."""
    found: dict[str, str] = {}
    for text in args.url or [URL]:
        name, named, url = text.partition("=")
        if not named or "/" in name:
            name, url = text.partition("://")[2].removesuffix("/v1").rstrip("/") or text, text
        if name in found:
            raise UserError(f"--url names {name} twice")
        found[name] = url
    if unknown := [name for name in args.undrafted if name not in found]:
        raise UserError(f"--undrafted takes names of --url, {', '.join(found)}, not {', '.join(unknown)}")
    return found


def _write(test: Scenario, args: argparse.Namespace, measured: Measured) -> Results:
    """Print and write the measured loads."""
    results: Results = {}
    for turn, found in measured.records.items():
        load, arm, _ = turn
        seconds = measured.processor.get(turn)
        summary = summarise(found, load, test.warm_up, test.seconds, test.objectives, seconds)
        results.setdefault(load, {}).setdefault(arm, []).append(summary)
    if results:
        report.show(results, UNITS[test.arrivals.kind], args.plot)
        record.write(
            args.json,
            "load by URL",
            report.named(results),
            scenario=test.model_dump(mode="json"),
            memory_mb=measured.memory,
            models=measured.models,
            learning=measured.learning,
        )
        if args.csv:
            report.write_csv(args.csv, measured.records, test.warm_up)
    return results


async def _measure(test: Scenario, args: argparse.Namespace, measured: Measured) -> None:
    """Fill `measured`, turn by turn."""
    trace = arrivals.read_trace(test.arrivals.file) if isinstance(test.arrivals, Trace) else []
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(remote.connect(url, args.api_key, args.model))
            for name, url in urls(args).items()
        }
        countings = {
            name: await Counting.of(server, test.timeout) if workload.needs_counting(test, trace) else None
            for name, server in servers.items()
        }
        watched = {name: server_processes.of_server(url) for name, url in urls(args).items()}
        processes = {name: here.processes for name, here in watched.items() if here}
        learners = {name: p[LEARNER] for name, p in processes.items() if LEARNER in p}
        measured.learning += learners
        measured.models |= {name: Path(server.model).name for name, server in servers.items()}
        rounds = args.rounds or (1 if len(servers) == 1 else ROUNDS)
        loads = test.arrivals.loads
        for number, load, arm in harness.alternate_arms(rounds, loads, list(servers)):
            asked = test.model_copy(update={"body": test.body | UNDRAFTED}) if arm in args.undrafted else test
            work = Workload(asked, countings[arm], (number, loads.index(load)))
            turn, here = (load, arm, number), watched[arm]
            if learners:
                await asyncio.sleep(LEARNER_SECONDS)
            with server_processes.suspended(found for name, found in learners.items() if name != arm):
                before = here.processor_seconds() if here else 0.0
                measured.records[turn] = await generate.at_load(servers[arm], test, work, trace, load)
                if here:
                    measured.processor[turn] = here.processor_seconds() - before
        measured.memory |= {name: found.shared_once() for name, found in watched.items() if found}


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as a scenario; paths are relative to the current folder."""
    changes: dict[str, Any] = {}
    for name in ("seconds", "warm_up", "timeout", "seed"):
        if (value := getattr(args, name)) is not None:
            changes[name] = value
    if said := _arrivals(args):
        changes["arrivals"] = said
    requests: dict[str, Any] = {}
    if args.prompts:
        requests |= {"prompts": [str(path.absolute()) for path in args.prompts], "texts": []}
    if args.input_tokens is not None:
        requests |= {"input_tokens": args.input_tokens, "prompts": [], "texts": []}
    if args.new_tokens is not None:
        least, most = harness.length_range("--new-tokens", args.new_tokens)
        spread = (most - least) / math.sqrt(12)  # standard deviation of a uniform distribution
        requests["output_tokens"] = {"mean": (least + most) / 2, "stdev": spread, "min": least, "max": most}
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
