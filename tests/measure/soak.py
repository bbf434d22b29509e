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
import os
import random
import re
import sys
import time
from pathlib import Path

import script
import soak_traffic
from soak_report import Soak
from soak_traffic import SoakCounts, SoakQuestion

from outrider.server.bench import harness, record, remote, server_processes
from outrider.server.bench.remote import Remote
from outrider.server.bench.server_processes import ProcessSample, ServerProcesses
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
    record.write(args.json, "soak", soak.plain())
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
        questions, failures = await soak_traffic.ask_alone(server, questions, args.timeout)
        if failures:
            raise UserError(f"the idle server did not answer {len(failures)} prompts: {failures[0]}")
        counts, samples = SoakCounts(), list[ProcessSample]()
        seconds = args.minutes * 60
        watch = asyncio.create_task(_watch(watched, samples, counts))
        began = time.monotonic()
        await soak_traffic.press(
            server, questions, concurrency=args.concurrency, seconds=seconds, seed=args.seed, timeout=args.timeout,
            counts=counts,
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
            samples.append(watched.sample())
        if (now := time.monotonic()) - said >= SAY_SECONDS:
            said = now
            memory = f", {sum(samples[-1].resident.values()):.0f} MB" if samples else ""
            harness.log(
                f"{(now - began) / 60:5.1f} min: {sum(counts.asked.values())} requests, {counts.compared} compared,"
                f" {counts.changed} changed, {counts.broken} broken{memory}"
            )
        await asyncio.sleep(SAMPLE_SECONDS)


async def _becomes_empty(server: Remote) -> tuple[float | None, dict[str, float]]:
    """Seconds until requests hold no cache, None if never; and the usage at the end, by gauge.

    A server without such gauges passes: 0 seconds and no gauges.
    """
    began = time.monotonic()
    while True:
        held: dict[str, float] = {}
        for name, value in HELD.findall(await server.metrics()):
            held[name] = held.get(name, 0.0) + float(value)
        seconds = time.monotonic() - began
        if not any(held.values()):
            return seconds if held else 0.0, held
        if seconds > EMPTY_SECONDS:
            return None, held
        await asyncio.sleep(1)


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
