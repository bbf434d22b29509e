"""Tokens per second with speculation over without, on the same engine and the same prompts.

The two arms take turns, round by round, so that what else the machine does meets both. The ratio and its spread are
the result; the rates themselves hold for this machine at this moment. Where no profile fits, a quick one is measured
first, as a server does.

example:
  outrider bench speed --prompts humaneval.jsonl --concurrency 1,8
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

from ..plugin.options import RequestOptions
from ..processes import client, session
from ..prompt_files import read_questions
from ..settings.flags import add_engine_flags, settings_of
from ..settings.resolve import resolve
from . import harness

if TYPE_CHECKING:
    from ..processes.engine import Engine

ARMS = {"off": RequestOptions(enabled=False), "on": RequestOptions()}

Results = dict[int, dict[str, list[float]]]
"""{concurrency: {arm: [tokens per second, one per round]}}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=True)
    harness.add_rounds_flags(parser)


def run(args: argparse.Namespace) -> int:
    from ..tune.first import measure_first

    concurrencies = harness.check_rounds(args)
    questions = read_questions(args.prompts)
    resolved = resolve(settings_of(args, disable_radix_cache=True))

    async def measurement(engine: Engine) -> Results:
        await measure_first(engine, resolved, harness.say)
        return await _measure(engine.tokenizer_manager, questions, concurrencies, args)

    results = session.run(resolved, measurement)
    _report(results)
    harness.write_json(args.json, results)
    return 0


async def _measure(manager: Any, questions: list[str], concurrencies: list[int], args: argparse.Namespace) -> Results:
    async def rate(concurrency: int, options: RequestOptions, skip: int) -> float:
        count = max(args.count, concurrency)
        chosen = [questions[(skip + i) % len(questions)] for i in range(count)]

        async def ask(question: str) -> int:
            answer = await client.generate(
                manager,
                client.chat_ids(manager, question),
                temperature=args.temperature,
                max_new_tokens=args.new_tokens,
                custom_params=options.to_custom_params(),
            )
            return len(answer["output_ids"])

        tokens, seconds = await harness.closed_loop(ask, chosen, concurrency)
        return sum(tokens) / seconds

    results: Results = {concurrency: {arm: [] for arm in ARMS} for concurrency in concurrencies}
    await rate(1, RequestOptions(), 0)  # warm
    for number, concurrency, arm in harness.turns(args.rounds, concurrencies, list(ARMS)):
        results[concurrency][arm].append(await rate(concurrency, ARMS[arm], number * args.count))
    return results


def _report(results: Results) -> None:
    print(f"{'requests':>8} {'off tok/s':>10} {'on tok/s':>10} {'ratio':>7}  spread of the ratio over rounds")
    for concurrency, rates in results.items():
        found = harness.ratio(rates["on"], rates["off"])
        off, on = statistics.median(rates["off"]), statistics.median(rates["on"])
        print(f"{concurrency:>8} {off:10.1f} {on:10.1f} {found.median:7.2f}  {found.spread}")
