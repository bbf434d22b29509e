"""Keeps a server under mixed load for long, and checks for faults.

Before the load, every prompt is sent alone, at temperature 0. Then --concurrency clients send requests without a pause:
greedy ones, streamed or not, with answers that are compared with the first; sampled ones with penalties, seeds and
logprobs; ones with a JSON schema; and ones that are aborted half way. Meanwhile the memory of each process of a server
on this machine is read. At the end the cache must become empty, if the server's metrics show it (SGLang's, vLLM's).

The exit code is 1 after any 5xx, broken or changed answer, or answer against its schema; if the cache did not become
empty; or if memory grew by more than --most-growth after the warm-up. If a server's rounding depends on the batch, some
answers change: --no-compare counts them without a fault.

examples:
  python tests/measure/soak.py --url http://127.0.0.1:30000 --minutes 30 --concurrency 64 --json soak.json
"""

import argparse
import asyncio
import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import aiohttp
import numpy as np
import psutil
import script
import soak_traffic
from soak_traffic import SoakCounts, SoakQuestion

from outrider.server.bench import harness, record, remote, server_processes
from outrider.server.bench.remote import Remote
from outrider.server.bench.server_processes import MB, ServerProcesses
from outrider.server.errors import UserError
from outrider.server.prompt_files import BUILT_IN, read_mixed_questions

SAMPLE_SECONDS = 2.0
SAY_SECONDS = 30.0
EMPTY_SECONDS = 60.0
"""Time limit for the cache to become empty; an idle SGLang renews its metrics every 30 s."""
HELD = re.compile(
    r"^(sglang:num_running_reqs|sglang:num_queue_reqs|sglang:num_used_tokens"
    r"|vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc)(?:\{[^}]*\})? (\S+)",
    re.MULTILINE,
)
"""Gauges of requests' cache usage."""
LOW = 10
"""Percentile of memory over a tenth of the time that counts as held. Memory above it is a step's workspace: logits of a
batch and their sorted copies are hundreds of MB that come and go between two samples."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """Memory of each process at one moment, MB by name: all resident memory, and its anonymous part.

    seconds: since the watch began.
    """

    seconds: float
    resident: Mapping[str, float]
    anonymous: Mapping[str, float]

    @classmethod
    def of(cls, watched: ServerProcesses, seconds: float) -> Self:
        """Memory of the running processes now."""
        resident, anonymous = {}, {}
        for name, process in watched.processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                memory = process.memory_info()  # shared: of files and shared memory
                resident[name], anonymous[name] = memory.rss / MB, (memory.rss - memory.shared) / MB
        return cls(seconds, resident, anonymous)


@dataclass(frozen=True, slots=True)
class Soak:
    """Results of a soak.

    seconds: under load. warm_up: the part of them before memory counts. most_growth: MB. may_not_change: greedy
    answers. emptied: seconds until the cache was empty; None: never. held: cache usage at the end, by the server's
    gauges, if any.
    """

    counts: SoakCounts
    samples: Sequence[ProcessSample]
    seconds: float
    warm_up: float
    most_growth: float
    may_not_change: bool
    emptied: float | None
    held: dict[str, float]

    def memory(self) -> dict[str, tuple[float, float]]:
        """Anonymous MB held after the warm-up and at the end, of each process that lived from one to the other. Pages
        of files come and go with the machine's free memory."""
        warm = [sample for sample in self.samples if sample.seconds >= self.warm_up]
        found = {}
        for name in warm[0].anonymous if len(warm) >= 4 else ():
            if name in warm[-1].anonymous:
                memory = [sample.anonymous[name] for sample in warm if name in sample.anonymous]
                few = max(1, len(memory) // 10)
                found[name] = float(np.percentile(memory[:few], LOW)), float(np.percentile(memory[-few:], LOW))
        return found

    def faults(self) -> list[str]:
        """All faults of the run."""
        counts, found = self.counts, []
        if counts.broken:
            found.append(f"{counts.broken} requests failed")
        if counts.changed and self.may_not_change:
            found.append(f"{counts.changed} greedy answers are not what they were alone")
        if counts.against_schema:
            found.append(f"{counts.against_schema} answers do not follow their schema")
        if self.emptied is None:
            found.append("the cache did not become empty")
        grown = sum(last - first for first, last in self.memory().values())
        if grown > self.most_growth:
            found.append(f"memory grew by {grown:.0f} MB after the warm-up; {self.most_growth:g} are allowed")
        return found

    def table(self) -> str:
        counts = self.counts
        asked = ", ".join(f"{kind} {counts.whole[kind]} of {number}" for kind, number in counts.asked.items())
        failures = ", ".join(f"{failure}: {number}" for failure, number in counts.failures.items()) or "none"
        held = ", ".join(f"{name} {value:g}" for name, value in self.held.items())
        emptied = f"is not empty: {held}" if self.emptied is None else f"was empty after {self.emptied:.0f} s"
        return "\n".join(
            [
                f"{sum(counts.asked.values())} requests in {self.seconds / 60:.1f} minutes; whole answers: {asked}",
                f"failures: {failures}",
                f"greedy answers compared with the same prompt alone: {counts.compared}, changed: {counts.changed}",
                f"answers against their schema: {counts.against_schema}",
                f"the cache {emptied}" if held else "the server does not say what its cache holds",
                *(f"{name}: {first:.1f} MB after the warm-up, {last:.1f} at the end"
                  for name, (first, last) in self.memory().items()),
                *(f"  {example}" for example in counts.examples),
                "; ".join(self.faults()) or "nothing found",
            ]
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:30000", help="address of an OpenAI server (default: %(default)s)")
    add("--api-key", default=os.environ.get("OUTRIDER_API_KEY"), metavar="KEY", help="key (default: OUTRIDER_API_KEY)")
    add("--model", metavar="NAME", help="model to ask for (default: the first that the server lists)")
    add("--prompts", type=Path, nargs="+", default=[BUILT_IN], metavar="FILE", help=harness.PROMPTS_HELP)
    add("--count", type=int, default=48, metavar="N", help="different prompts, at most (default: %(default)s)")
    add("--new-tokens", type=int, default=96, metavar="N", help="longest greedy answer (default: %(default)s)")
    add("--concurrency", type=int, default=64, metavar="N", help="requests in flight (default: %(default)s)")
    add("--minutes", type=float, default=30.0, metavar="M", help="minutes of load (default: %(default)g)")
    add("--no-compare", action="store_true", help="a changed answer is no fault")
    add("--warm-up", type=float, metavar="M", help="minutes in which memory may grow (default: a third of --minutes)")
    add(
        "--most-growth", type=float, default=64.0, metavar="MB",
        help="memory growth after the warm-up (default: %(default)g)",
    )  # fmt: skip
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for one answer (default: %(default)g)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the choice of requests (default: 0)")
    harness.add_output_flags(parser, json="every count and memory sample")


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "count", "new_tokens", "concurrency")
    if args.minutes <= 0:
        raise UserError(f"--minutes is above 0, not {args.minutes:g}")
    harness.check_outputs(args)
    soak = asyncio.run(_soak(args))
    print(soak.table())
    record.write(args.json, "soak", asdict(soak) | {"faults": soak.faults(), "memory": soak.memory()})
    return 1 if soak.faults() else 0


def _questions(args: argparse.Namespace) -> list[SoakQuestion]:
    texts = list(dict.fromkeys(read_mixed_questions(args.prompts)))[: args.count]
    lengths = random.Random(args.seed)
    return [SoakQuestion(text, lengths.randint(min(8, args.new_tokens), args.new_tokens)) for text in texts]


async def _soak(args: argparse.Namespace) -> Soak:
    questions = _questions(args)
    async with remote.connect(args.url, args.api_key, args.model) as server:
        watched = server_processes.of_server(args.url)
        if watched is None:
            harness.log("The server's processes are not to be seen from here: its memory is not watched")
        harness.log(f"Asking {len(questions)} prompts alone")
        if failures := await soak_traffic.ask_alone(server, questions, args.timeout):
            raise UserError(f"the idle server did not answer {len(failures)} prompts: {failures[0]}")
        counts, samples = SoakCounts(), list[ProcessSample]()
        seconds = args.minutes * 60
        watch = asyncio.create_task(_watch(watched, samples, counts))
        began = time.monotonic()
        await soak_traffic.press(
            server, questions, counts, concurrency=args.concurrency, seconds=seconds, seed=args.seed,
            timeout=args.timeout,
        )  # fmt: skip
        took = time.monotonic() - began
        empty, held = await _becomes_empty(server)
        watch.cancel()
    warm_up = seconds / 3 if args.warm_up is None else args.warm_up * 60
    return Soak(counts, samples, took, warm_up, args.most_growth, not args.no_compare, empty, held)


async def _watch(watched: ServerProcesses | None, samples: list[ProcessSample], counts: SoakCounts) -> None:
    said = began = time.monotonic()
    while True:
        if watched is not None:
            samples.append(ProcessSample.of(watched, time.monotonic() - began))
        if (now := time.monotonic()) - said >= SAY_SECONDS:
            said = now
            memory = f", {sum(samples[-1].resident.values()):.0f} MB" if samples else ""
            harness.log(
                f"{(now - began) / 60:5.1f} min: {sum(counts.asked.values())} requests, {counts.compared} compared,"
                f" {counts.changed} changed, {counts.broken} broken{memory}"
            )
        await asyncio.sleep(SAMPLE_SECONDS)


async def _metrics(server: Remote) -> str:
    """The page of /metrics; empty if the server has none."""
    try:
        async with asyncio.timeout(remote.ASK_SECONDS), server.session.get(f"{server.url}/metrics") as response:
            return await response.text() if response.ok else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""


async def _becomes_empty(server: Remote) -> tuple[float | None, dict[str, float]]:
    """Seconds until requests hold no cache, None if never; and the usage at the end, by gauge.

    A server without such gauges passes: 0 seconds and no gauges.
    """
    began = time.monotonic()
    while True:
        held: dict[str, float] = {}
        for name, value in HELD.findall(await _metrics(server)):
            held[name] = held.get(name, 0.0) + float(value)
        seconds = time.monotonic() - began
        if not any(held.values()):
            return seconds if held else 0.0, held
        if seconds > EMPTY_SECONDS:
            return None, held
        await asyncio.sleep(1)


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
