"""Accepted length and acceptance by position of a drafter, on files of prompts.

Every draft is verified (no scheduling), so the numbers are the drafter's own. tau counts the bonus token. A prompts
file has one JSON object a line with "turns": [user turns] (the first is asked) or "prompt".
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.drafters.acceptance import Acceptance, acceptance_table, plot_acceptance
from outrider.server.engine import client, session
from outrider.server.engine.flags import add_engine_flags, settings_of
from outrider.server.engine.questions import read_questions
from outrider.server.engine.resolve import resolve
from outrider.server.errors import UserError
from outrider.server.plugin import control
from outrider.server.plugin.options import RequestOptions

if TYPE_CHECKING:
    from outrider.server.engine.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--count", type=int, default=64, metavar="N", help="prompts of each file (default: 64)")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N", help="of each answer (default: 256)")
    parser.add_argument("--temperatures", default="0,1", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests at a time (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw acceptance by position there (PNG)")


def run(args: argparse.Namespace) -> int:
    try:
        temperatures = [float(part) for part in args.temperatures.split(",")]
    except ValueError:
        raise UserError(f"--temperatures is a list like 0,1, not {args.temperatures!r}") from None
    if min(args.count, args.new_tokens, args.concurrency) < 1:
        raise UserError("--count, --new-tokens and --concurrency are at least 1")
    questions = {}
    for path in args.prompts:
        questions[path.stem] = read_questions(path)[: args.count]

    async def measurement(engine: Engine) -> dict[str, Acceptance]:
        return await _measure(engine, questions, temperatures, args)

    results = session.run(resolve(settings_of(args)), measurement)
    print(acceptance_table(results))
    if args.json:
        counts = {name: {"tau": a.accepted_length, "tried": a.tried, "kept": a.kept} for name, a in results.items()}
        args.json.write_text(json.dumps(counts, indent=1) + "\n")
    if args.plot:
        plot_acceptance(results, args.plot)
    return 0


async def _measure(
    engine: Engine, questions: dict[str, list[str]], temperatures: Sequence[float], args: argparse.Namespace
) -> dict[str, Acceptance]:
    from tqdm import tqdm

    manager = engine.tokenizer_manager
    results = {}
    gate = asyncio.Semaphore(args.concurrency)
    total = len(temperatures) * sum(map(len, questions.values()))
    with tqdm(total=total, unit="answer") as progress:

        async def ask(question: str, temperature: float) -> None:
            async with gate:
                ids = client.chat_ids(manager, question)
                room = engine.context_length - len(ids) - args.gamma - 2
                if room > 0:
                    await client.generate(
                        manager,
                        ids,
                        temperature=temperature,
                        max_new_tokens=min(args.new_tokens, room),
                        custom_params=RequestOptions(planned=False).to_custom_params(),
                    )
                progress.update()

        for name, asked in questions.items():
            for temperature in temperatures:
                before = await _counts(manager, args.gamma)
                await asyncio.gather(*(ask(question, temperature) for question in asked))
                results[f"{name}, T={temperature:g}"] = _difference(await _counts(manager, args.gamma), before)
    return results


async def _counts(manager: Any, gamma: int) -> Acceptance:
    """What the worker has counted since it started."""
    await control.read(manager)  # brings its counters up to date
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)

    def value(name: str, **labels: Any) -> int:
        return int(registry.get_sample_value(name, labels) or 0)

    cycles = value("outrider_request_steps_total")
    positions = [str(k) for k in range(1, gamma + 1)]
    return Acceptance(
        cycles=cycles,
        tokens=cycles + value("outrider_accepted_tokens_total"),
        tried=tuple(value("outrider_verified_position_total", position=k) for k in positions),
        kept=tuple(value("outrider_accepted_position_total", position=k) for k in positions),
    )


def _difference(after: Acceptance, before: Acceptance) -> Acceptance:
    return Acceptance(
        after.cycles - before.cycles,
        after.tokens - before.tokens,
        tuple(a - b for a, b in zip(after.tried, before.tried, strict=True)),
        tuple(a - b for a, b in zip(after.kept, before.kept, strict=True)),
    )
