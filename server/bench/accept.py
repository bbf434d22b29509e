"""Accepted length and acceptance by position of a drafter, on files of prompts.

Every draft is verified (no planning), so the numbers are the drafter's own. The accepted length tau counts the bonus
token. Acceptance at a position is conditional: of the drafts whose earlier positions were all accepted.

example:
  outrider bench accept --prompts humaneval.jsonl gsm8k.jsonl --json accept.json --plot accept.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.drafters.acceptance import Acceptance, acceptance_table, plot_acceptance

from .. import pictures
from ..plugin import worker_rpc
from ..plugin.options import RequestOptions
from ..processes import client, session
from ..prompt_files import read_questions
from ..settings.flags import add_engine_flags, settings_of
from ..settings.resolve import resolve
from . import harness

if TYPE_CHECKING:
    from ..processes.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=True)
    add = parser.add_argument
    add("--prompts", nargs="+", type=Path, required=True, metavar="FILE", help=harness.PROMPTS_HELP)
    add("--count", type=int, default=64, metavar="N", help="prompts of each file (default: %(default)s)")
    add("--new-tokens", type=int, default=256, metavar="N", help="of each answer, at most (default: %(default)s)")
    add("--temperatures", default="0,1", metavar="LIST", help="(default: %(default)s)")
    add("--concurrency", type=int, default=8, metavar="N", help="requests in flight (default: %(default)s)")
    harness.add_output_flags(parser, json="the counts", plot="acceptance by position")


def run(args: argparse.Namespace) -> int:
    temperatures = harness.numbers_from_zero("--temperatures", args.temperatures)
    harness.check_positive(args, "count", "new_tokens", "concurrency")
    harness.check_outputs(args)
    questions = {path.stem: read_questions(path)[: args.count] for path in args.prompts}

    async def measurement(engine: Engine) -> dict[str, Acceptance]:
        return await _measure(engine, questions, temperatures, resolved.settings.plugin_config.longest, args)

    resolved = resolve(settings_of(args))
    results = session.run(resolved, measurement)
    print(acceptance_table(results))
    harness.write_json(args.json, {name: acceptance.counts() for name, acceptance in results.items()})
    if args.plot:
        with pictures.figure(args.plot) as figure:
            plot_acceptance({"": results}, figure)
    return 0


async def _measure(
    engine: Engine,
    questions: dict[str, list[str]],
    temperatures: Sequence[float],
    longest: int,
    args: argparse.Namespace,
) -> dict[str, Acceptance]:
    from tqdm import tqdm

    manager = engine.tokenizer_manager
    results = {}
    total = len(temperatures) * sum(map(len, questions.values()))
    options = RequestOptions(planned=False).to_custom_params()
    with tqdm(total=total, unit="answer") as progress:

        async def ask(question: str, temperature: float) -> None:
            await client.answer(
                engine, question, args.new_tokens, kept=longest + 2, temperature=temperature, custom_params=options
            )
            progress.update()

        for name, asked in questions.items():
            for temperature in temperatures:
                before = await _counts(manager, longest)
                await harness.closed_loop(partial(ask, temperature=temperature), asked, args.concurrency)
                results[f"{name}, T={temperature:g}"] = _difference(await _counts(manager, longest), before)
    return results


async def _counts(manager: Any, gamma: int) -> Acceptance:
    """What the worker has counted since it started."""
    await worker_rpc.read(manager)  # brings its counters up to date
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)

    samples = [sample for metric in registry.collect() for sample in metric.samples]

    def value(name: str, **labels: str) -> int:
        return int(sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items()))

    positions = [str(k) for k in range(1, gamma + 1)]
    return Acceptance(
        cycles=value("outrider_request_steps_total"),
        tokens=value("outrider_accepted_length_sum"),
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
