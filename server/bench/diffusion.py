"""Forwards per token and tokens per second of a block-diffusion model: base decoding, and Spiffy by draft states.

The arms take turns, round by round, on the same engine and the same prompts; each policy of --unmasking has an engine
of its own. Where texts of arms differ it is said. `drafted` are states per forward of an open block, `fewer` how many
times fewer forwards an arm needs than base decoding. D=0 makes drafts' tokens ready and drafts none.

examples:
  outrider bench diffusion --model ./SDAR-1.7B-Chat --prompts humaneval.jsonl --concurrency 1,8
  outrider bench diffusion --model ./SDAR-1.7B-Chat --prompts gsm8k.jsonl --unmasking static,threshold \\
      --unmasking-threshold 0.9
"""

from __future__ import annotations

import argparse
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..plugin import worker_rpc
from ..plugin.options import RequestOptions
from ..processes import client, process, session
from ..prompt_files import read_questions
from ..settings.flags import add_engine_flags, add_unmasking_flags, settings_of
from ..settings.resolve import resolve
from ..settings.settings import Settings
from . import harness

if TYPE_CHECKING:
    from ..processes.engine import Engine

ARMS = {"base": RequestOptions(enabled=False)}
ARMS |= {f"D={states}": RequestOptions(gamma=states, planned=False) for states in (0, 1, 2, 3)}
ARMS |= {"planned": RequestOptions()}

Results = dict[int, dict[str, list[dict[str, float]]]]
"""{concurrency: {arm: [what was measured, one per round]}}, of a policy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=False)
    add_unmasking_flags(parser, several=True)
    harness.add_rounds_flags(parser)


def run(args: argparse.Namespace) -> int:
    # Settings of all before the first is measured, so that what is wrong with one is said at once.
    policies = [
        settings_of(args, unmasking=policy, disable_radix_cache=True) for policy in args.unmasking.split(",") if policy
    ]
    if not policies:
        raise UserError("--unmasking names no policy; static,threshold are those there are")

    concurrencies = harness.check_rounds(args)
    questions = read_questions(args.prompts)

    results: dict[str, Results] = {}
    # SGLang starts no second engine in a process.
    spawned, ends = get_context("spawn"), (os.getpid(),)
    with ProcessPoolExecutor(1, spawned, process.die_with, ends, max_tasks_per_child=1) as processes:
        for settings in policies:
            policy = settings.unmasking_policy
            found = processes.submit(_of_policy, settings, questions, concurrencies, args).result()
            print(f"unmasking {policy}")
            _report(found)
            results[policy] = found
    harness.write_json(args.json, results)
    return 0


def _of_policy(settings: Settings, questions: list[str], concurrencies: list[int], args: argparse.Namespace) -> Results:
    resolved = resolve(settings)
    if resolved.settings.diffusion is None:
        raise UserError("the model is no block-diffusion model; outrider bench speed measures others")

    async def measurement(engine: Engine) -> Results:
        return await _measure(engine.tokenizer_manager, questions, concurrencies, args)

    return session.run(resolved, measurement)


async def _measure(manager: Any, questions: list[str], concurrencies: list[int], args: argparse.Namespace) -> Results:
    texts: dict[tuple[int, int], list[list[int]]] = {}

    async def once(number: int, concurrency: int, options: RequestOptions) -> dict[str, float]:
        count = max(args.count, concurrency)
        chosen = [questions[(number * args.count + i) % len(questions)] for i in range(count)]

        async def ask(question: str) -> list[int]:
            answer = await client.generate(
                manager,
                client.chat_ids(manager, question),
                temperature=args.temperature,
                max_new_tokens=args.new_tokens,
                sampling_seed=number,
                custom_params=options.to_custom_params(),
            )
            found: list[int] = answer["output_ids"]
            return found

        before = await _counted(manager)
        answers, seconds = await harness.closed_loop(ask, chosen, concurrency)
        after = await _counted(manager)
        differ = sum(a != b for a, b in zip(texts.setdefault((number, concurrency), answers), answers, strict=True))
        tokens, more = sum(map(len, answers)), {name: after[name] - before[name] for name in after}
        return {
            "tokens_per_second": tokens / seconds,
            "forwards_per_token": more["request_forwards"] / tokens,
            "drafted_per_forward": more["drafted"] / more["request_forwards"],
            "differ": differ,
        }

    results: Results = {concurrency: {arm: [] for arm in ARMS} for concurrency in concurrencies}
    for options in ARMS.values():  # warm
        await once(args.rounds, concurrencies[0], options)
    for number, concurrency, arm in harness.turns(args.rounds, concurrencies, list(ARMS)):
        results[concurrency][arm].append(await once(number, concurrency, ARMS[arm]))
    return results


async def _counted(manager: Any) -> dict[str, int]:
    """Sums over the engines of what block diffusion has counted."""
    engines = [live["diffusion"] for live in await worker_rpc.read_live(manager)]
    return {name: sum(engine[name] for engine in engines) for name in engines[0]}


def _report(results: Results) -> None:
    differ = sum(int(one["differ"]) for arms in results.values() for found in arms.values() for one in found)
    print(f"answers that differ between arms: {differ}")
    print(
        f"{'requests':>8} {'arm':>8} {'drafted':>8} {'forwards/token':>14} {'fewer':>8} {'tok/s':>8} {'over base':>20}"
    )
    for concurrency, arms in results.items():
        base = arms["base"]
        for arm, found in arms.items():
            each = {name: [one[name] for one in found] for name in found[0]}
            fewer = harness.ratio([one["forwards_per_token"] for one in base], each["forwards_per_token"])
            faster = harness.ratio(each["tokens_per_second"], [one["tokens_per_second"] for one in base])
            middle = {name: statistics.median(values) for name, values in each.items()}
            print(
                f"{concurrency:>8} {arm:>8} {middle['drafted_per_forward']:8.2f} {middle['forwards_per_token']:14.3f} "
                f"{fewer.median:7.2f}x {middle['tokens_per_second']:8.1f} {faster.cell:>20}"
            )
