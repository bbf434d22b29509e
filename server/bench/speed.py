"""Tokens per second with speculation against without, on the same engine and the same prompts.

The two arms take turns, round by round, in one session, so that what else the machine does meets both. The ratio and
its spread are the result; the rates themselves hold for this machine at this moment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.server.engine import client, session
from outrider.server.engine.flags import add_engine_flags, settings_of
from outrider.server.engine.questions import read_questions
from outrider.server.engine.resolve import resolve
from outrider.server.errors import UserError
from outrider.server.plugin.options import RequestOptions

if TYPE_CHECKING:
    from outrider.server.engine.engine import Engine

ARMS = {"off": False, "on": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=True)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines, as for bench accept")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)g)")
    parser.add_argument("--concurrency", default="1", metavar="LIST", help="requests at a time (default: %(default)s)")
    parser.add_argument("--count", type=int, default=8, metavar="N", help="prompts per round, at least (default: 8)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="of each answer (default: 128)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="repetitions of each arm (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there as well")


def run(args: argparse.Namespace) -> int:
    try:
        concurrencies = [int(part) for part in args.concurrency.split(",")]
    except ValueError:
        raise UserError(f"--concurrency is a list like 1,8, not {args.concurrency!r}") from None
    if min(args.count, args.new_tokens, args.rounds, *concurrencies) < 1:
        raise UserError("--count, --new-tokens, --rounds and --concurrency are at least 1")
    questions = read_questions(args.prompts)
    settings = settings_of(args, disable_radix_cache=True)

    async def measurement(engine: Engine) -> dict[int, dict[str, list[float]]]:
        return await _measure(engine.tokenizer_manager, questions, concurrencies, args)

    results = session.run(resolve(settings), measurement)
    _report(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


async def _measure(
    manager: Any, questions: list[str], concurrencies: list[int], args: argparse.Namespace
) -> dict[int, dict[str, list[float]]]:
    """Tokens per second: {concurrency: {arm: [one per round]}}."""
    from tqdm import tqdm

    async def rate(concurrency: int, speculate: bool, skip: int) -> float:
        gate = asyncio.Semaphore(concurrency)
        count = max(args.count, concurrency)
        chosen = [questions[(skip + i) % len(questions)] for i in range(count)]

        async def ask(question: str) -> int:
            async with gate:
                answer = await client.generate(
                    manager,
                    client.chat_ids(manager, question),
                    temperature=args.temperature,
                    max_new_tokens=args.new_tokens,
                    custom_params=RequestOptions(enabled=speculate).to_custom_params(),
                )
                return len(answer["output_ids"])

        start = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(ask, chosen)))
        return tokens / (time.perf_counter() - start)

    results: dict[int, dict[str, list[float]]] = {c: {arm: [] for arm in ARMS} for c in concurrencies}
    await rate(1, True, 0)  # warm
    with tqdm(total=args.rounds * len(concurrencies) * len(ARMS), unit="arm") as progress:
        for done in range(args.rounds):
            for concurrency, rates in results.items():
                for arm, speculate in ARMS.items():
                    rates[arm].append(await rate(concurrency, speculate, done * args.count))
                    progress.update()
    return results


def _report(results: dict[int, dict[str, list[float]]]) -> None:
    print(f"{'requests':>8} {'off tok/s':>10} {'on tok/s':>10} {'ratio':>7}  spread of the ratio over rounds")
    for concurrency, rates in results.items():
        ratios = sorted(on / off for on, off in zip(rates["on"], rates["off"], strict=True))
        off, on = statistics.median(rates["off"]), statistics.median(rates["on"])
        median = statistics.median(ratios)
        print(f"{concurrency:>8} {off:10.1f} {on:10.1f} {median:7.2f}  {ratios[0]:.2f} to {ratios[-1]:.2f}")
