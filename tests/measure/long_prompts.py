"""A long prompt and then a short one arrive while answers are streamed: pauses, pace and times to the first token.

Several servers take turns. The streams' prompts come from a file; all other texts are new in every turn.

examples:
  python tests/measure/long_prompts.py 1000,5000 --url http://127.0.0.1:30000
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import script

from outrider.server.bench import harness, record, remote
from outrider.server.bench.load import by_url, workload
from outrider.server.bench.load.workload import Counting
from outrider.server.bench.remote import CHAT, Remote, Reply
from outrider.server.errors import UserError
from outrider.server.prompt_files import BUILT_IN, read_mixed_questions

BEFORE_SECONDS = 2.0
"""Time from the first token of the last stream to the long prompt."""
BEGUN_SECONDS = 0.02
"""Interval of the checks that all streams have begun."""
SHORT_TOKENS, SHORT_SECONDS = 50, 0.5
"""Tokens of the short prompt, and its delay after the long one."""
TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Interruption:
    """Effects of a long prompt, answered by one token, on streams. Times in seconds.

    pause: longest whole gap of a stream that overlaps the prompt's answer time. pace: the streams' pieces per second in
    that time, over the rate before. short: answer time of the short prompt. throughput: tokens per second, prompts
    included, from the first request to the end of the last.
    """

    pause: float
    pace: float
    alone: float  # the long prompt's answer time without streams
    beside: float  # with streams
    short: float
    throughput: float

    @property
    def slower(self) -> float:
        return self.beside / self.alone


COLUMNS: dict[str, tuple[Callable[[Interruption], float], int]] = {
    "longest pause, s": (lambda one: one.pause, 3),
    "pace kept": (lambda one: one.pace, 2),
    "TTFT alone, s": (lambda one: one.alone, 2),
    "beside, s": (lambda one: one.beside, 2),
    "× alone": (lambda one: one.slower, 2),
    "short behind, s": (lambda one: one.short, 3),
    "tok/s with prompts": (lambda one: one.throughput, 0),
}
Interruptions = dict[float, dict[str, list[Interruption]]]
"""{tokens of the long prompt: {arm: [one per round]}}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("lengths", metavar="LIST", help="tokens of the long prompts")
    add("--url", nargs="+", metavar="[NAME=]URL", help=f"servers that take turns (default: {by_url.URL})")
    add("--streams", type=int, default=4, metavar="N", help="answers that are streamed (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="measurements of each server (default: %(default)s)")
    add("--prompts", type=Path, nargs="+", default=[BUILT_IN], metavar="FILE", help=harness.PROMPTS_HELP)
    add("--model", metavar="NAME", help="the model to ask for (default: the first that a server lists)")
    add("--api-key", default=os.environ.get("OUTRIDER_API_KEY"), metavar="KEY", help="key (default: OUTRIDER_API_KEY)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the texts (default: 0)")
    harness.add_output_flags(parser)
    parser.set_defaults(undrafted=[])


def run(args: argparse.Namespace) -> int:
    """Measure every length in turn; print and write the results."""
    lengths = harness.positive_integers("the lengths", args.lengths)
    harness.check_positive(args, "streams", "rounds")
    harness.check_outputs(args)
    results: Interruptions = {}
    models: dict[str, str] = {}
    try:
        asyncio.run(_measure(args, lengths, results, models))
    finally:
        if results:
            print(table(results))
            named = {f"{tokens:g}": arms for tokens, arms in results.items()}
            record.write(args.json, "long prompts", named, streams=args.streams, models=models)
    return 0


async def _measure(
    args: argparse.Namespace, lengths: Sequence[int], results: Interruptions, models: dict[str, str]
) -> None:
    """Fill `results` turn by turn, and `models` with the file name of each server's model."""
    questions = read_mixed_questions(args.prompts)
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(remote.connect(url, args.api_key, args.model))
            for name, url in by_url.urls(args).items()
        }
        models |= {name: Path(server.model).name for name, server in servers.items()}
        countings = {name: await Counting.of(server, TIMEOUT) for name, server in servers.items()}
        for number, tokens, arm in harness.alternate_arms(args.rounds, lengths, list(servers)):
            texts = np.random.default_rng([args.seed, number, tokens])
            turn = number * len(lengths) + lengths.index(tokens)
            asked = harness.rotated(questions, turn * args.streams)[: args.streams]
            one = await interrupt(servers[arm], countings[arm], texts, asked, tokens)
            results.setdefault(tokens, {}).setdefault(arm, []).append(one)


async def interrupt(
    server: Remote, counting: Counting, texts: np.random.Generator, questions: Sequence[str], tokens: int
) -> Interruption:
    """Send a prompt of `tokens` alone, then another one during a stream for each question.

    Raises UserError if a request fails.
    """

    async def ask(text: str, new_tokens: int, into: Reply | None = None) -> Reply:
        more: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        reply = await server.ask(CHAT, workload.body(text, new_tokens, more), timeout=TIMEOUT, into=into)
        if reply.failure:
            raise UserError(f"a request failed: {reply.failure} {reply.detail}")
        return reply

    async def read(length: int) -> Reply:
        return await ask(workload.made_up(texts, counting.words(length)), 1)

    alone = await read(tokens)
    start = time.perf_counter()
    streams = [Reply() for _ in questions]
    asking = (ask(question, 512 + tokens // 4, stream) for question, stream in zip(questions, streams, strict=True))
    running = [asyncio.create_task(each) for each in asking]
    while not all(one.ttft or task.done() for one, task in zip(streams, running, strict=True)):
        await asyncio.sleep(BEGUN_SECONDS)
    await asyncio.sleep(BEFORE_SECONDS)
    sent = time.perf_counter() - start
    long = asyncio.create_task(read(tokens))
    await asyncio.sleep(SHORT_SECONDS)
    short = await read(SHORT_TOKENS)
    beside, *_ = await asyncio.gather(long, *running)
    seconds = time.perf_counter() - start
    pause, pace = pauses([list(accumulate(one.gaps, initial=one.ttft)) for one in streams], sent, sent + beside.seconds)
    every = [beside, short, *streams]
    total = sum(one.prompt_tokens + one.completion_tokens for one in every)
    return Interruption(pause, pace, alone.seconds, beside.seconds, short.seconds, total / seconds)


def pauses(pieces: Sequence[Sequence[float]], begin: float, end: float) -> tuple[float, float]:
    """Longest gap of a stream between `begin` and `end`, and pieces per second then over the rate before `begin`.

    pieces: times of each stream's pieces. A stream that ends early counts until its end.
    """
    longest, before, during = 0.0, [0, 0.0], [0, 0.0]
    for times in pieces:
        gaps = [(b - a) for a, b in pairwise(times) if b > begin and a < end]
        longest = max(longest, *gaps, 0.0)
        for counted, first, last in ((before, times[0], begin), (during, begin, min(end, times[-1]))):
            counted[0] += sum(first < at <= last for at in times)
            counted[1] += max(last - first, 0.0)
    if not (before[0] and during[1]):
        raise UserError("the streams ended before the long prompt came: use a longer one")
    return longest, during[0] / during[1] / (before[0] / before[1])


def table(results: Interruptions) -> str:
    """A row per length and arm, medians over the rounds; ratios to the first arm are within a round."""
    lines = [f"{'tokens':>7} {'arm':>16} " + " ".join(f"{name:>18}" for name in COLUMNS)]
    for tokens, arms in results.items():
        first = next(iter(arms))
        for arm, rounds in arms.items():
            cells = [
                f"{statistics.median(read(one) for one in rounds):>18.{digits}f}" for read, digits in COLUMNS.values()
            ]
            lines.append(f"{tokens:>7g} {arm:>16} {' '.join(cells)}")
            if arm != first and len(rounds) == len(arms[first]):
                compared = [
                    harness.ratio([read(one) for one in rounds], [read(one) for one in arms[first]]).cell
                    for read, _ in COLUMNS.values()
                ]
                lines.append(f"{'':>7} {f'× {first}':>16} {' '.join(f'{cell:>18}' for cell in compared)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
