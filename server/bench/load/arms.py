"""Throughput and latency of an engine of our own: without drafts, verifying every draft, and as the planner decides.

Arms take turns round by round on the same engine, which an option of each request tells what to do. Its table has one
row per concurrency and arm, medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import pictures
from ...errors import UserError
from ...plugin.options import RequestOptions
from ...processes import client, session
from ...prompt_files import read_mixed_questions
from ...settings.flags import Flags, settings_of
from ...settings.resolve import resolve
from .. import harness

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...processes.engine import Engine

ARMS = {
    "off": RequestOptions(enabled=False),
    "verify all": RequestOptions(planned=False),
    "planned": RequestOptions(),
}
LEVEL_EVERY = 3
"""Every third request is one with a service level."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: tokens of its answer, seconds to the first and to the last; whether it is one with a level."""

    tokens: int
    ttft: float
    seconds: float
    has_level: bool

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.seconds - self.ttft) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Round:
    """One arm at one concurrency, once. Speeds in tokens per second, times in seconds.

    per_user: median speed of a request after its first token. attained: share of the requests with a level that got
    it; None without levels.
    """

    throughput: float
    per_user: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    attained: float | None

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float, level: float | None) -> Round:
        """Sum up the answers that took `seconds` together."""
        ttft, tpot = np.array([a.ttft for a in answers]), np.array([a.tpot for a in answers])
        attained = [1 / a.tpot >= level for a in answers if a.has_level] if level else []
        return cls(
            throughput=sum(a.tokens for a in answers) / seconds,
            per_user=1 / float(np.median(tpot)),
            ttft_p50=float(np.percentile(ttft, 50)),
            ttft_p99=float(np.percentile(ttft, 99)),
            tpot_p50=float(np.percentile(tpot, 50)),
            tpot_p99=float(np.percentile(tpot, 99)),
            attained=statistics.mean(attained) if attained else None,
        )


Results = dict[int, dict[str, list[Round]]]
"""{concurrency: {arm: [one per round]}}"""


CONCURRENCY = "1,2,4,8,16,32"
NEW_TOKENS = 128


def add_flags(flags: Flags) -> None:
    add = flags.add_argument
    add(
        "--count",
        type=int,
        default=8,
        metavar="N",
        help="requests per round, at least; never fewer than twice those in flight (default: %(default)s)",
    )
    add("--rounds", type=int, default=3, metavar="N", help="measurements of each arm (default: %(default)s)")
    add("--arms", nargs="+", choices=[*ARMS], default=[*ARMS], help="(default: all)")
    add("--level", type=float, metavar="X", help="service level that every third request asks for, in tokens/s")


def run(args: argparse.Namespace) -> int:
    """Start an engine, let the arms take turns on it, print and write what was measured."""
    from ...tune.first import measure_first

    if not args.prompts:
        raise UserError("--prompts FILE… is needed without --url")
    concurrencies = harness.positive_integers("--concurrency", args.concurrency or CONCURRENCY)
    new_tokens = NEW_TOKENS if args.new_tokens is None else args.new_tokens
    harness.check_positive(args, "count", "rounds")
    if new_tokens < 1:
        raise UserError(f"--new-tokens is at least 1, not {new_tokens}")
    if args.level is not None and args.level <= 0:
        raise UserError("--level is a number of tokens per second above 0")
    harness.check_outputs(args)
    questions = read_mixed_questions(args.prompts)
    resolved = resolve(settings_of(args, disable_radix_cache=True, max_running_requests=max(concurrencies)))

    async def measurement(engine: Engine) -> Results:
        await measure_first(engine, resolved, harness.say)
        load = Load(engine.tokenizer_manager, args.temperature or 0.0, new_tokens, args.level)
        return await _measure(load, questions, concurrencies, args)

    results = session.run(resolved, measurement)
    print(table(results))
    plain = {c: {arm: [asdict(r) for r in rounds] for arm, rounds in arms.items()} for c, arms in results.items()}
    harness.write_json(args.json, plain)
    if args.plot:
        with pictures.figure(args.plot) as figure:
            plot(results, figure)
    return 0


async def _measure(
    load: Load, questions: Sequence[str], concurrencies: Sequence[int], args: argparse.Namespace
) -> Results:
    arms = {name: ARMS[name] for name in args.arms}
    if args.level and "planned" in arms:
        arms["no levels"] = arms["planned"]
    results: Results = {concurrency: {arm: [] for arm in arms} for concurrency in concurrencies}
    await load.run(questions[:2], 1, RequestOptions(), ask_level=False)  # warm
    for number, concurrency, arm in harness.turns(args.rounds, concurrencies, list(arms)):
        count = max(args.count, 2 * concurrency)
        chosen = [questions[(number * count + i) % len(questions)] for i in range(count)]
        measured = await load.run(chosen, concurrency, arms[arm], ask_level=arm == "planned")
        results[concurrency][arm].append(measured)
    return results


@dataclass(frozen=True, slots=True)
class Load:
    """What all requests have in common. level: the service level of every third one, in tokens per second."""

    manager: Any
    temperature: float
    new_tokens: int
    level: float | None

    async def run(
        self, questions: Sequence[str], concurrency: int, options: RequestOptions, *, ask_level: bool
    ) -> Round:
        """Answer the questions in a closed loop; ask_level: requests with a level ask for it."""

        async def ask(numbered: tuple[int, str]) -> Answer:
            index, question = numbered
            has_level = index % LEVEL_EVERY == 0
            level = self.level if has_level and ask_level else None
            return await self._answer(question, replace(options, min_tokens_per_second=level), has_level)

        answers, seconds = await harness.closed_loop(ask, enumerate(questions), concurrency)
        return Round.of(answers, seconds, self.level)

    async def _answer(self, question: str, options: RequestOptions, has_level: bool) -> Answer:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=client.chat_ids(self.manager, question),
            sampling_params={
                "temperature": self.temperature,
                "max_new_tokens": self.new_tokens,
                "custom_params": options.to_custom_params(),
            },
            stream=True,
        )
        start, ttft, tokens = time.perf_counter(), 0.0, 0
        async for piece in self.manager.generate_request(request):
            tokens = piece["meta_info"]["completion_tokens"]
            ttft = ttft or time.perf_counter() - start
        return Answer(tokens, ttft, time.perf_counter() - start, has_level)


def table(results: Results) -> str:
    """One row per concurrency and arm; in the planned arm's row its throughput over that of the better other arm."""
    lines = [
        f"{'requests':>8} {'arm':>10} {'tok/s':>7} {'per user':>8} {'TTFT p50':>9} {'p99':>7} {'TPOT p50':>9}"
        f" {'p99':>7} {'level kept':>10}  planned over the better of the others"
    ]
    for concurrency, arms in results.items():
        for arm, rounds in arms.items():
            middle = {name: statistics.median(getattr(r, name) for r in rounds) for name in _SHOWN}
            attained = [r.attained for r in rounds if r.attained is not None]
            planned = planned_ratio(arms) if arm == "planned" else None
            lines.append(
                f"{concurrency:>8} {arm:>10} {middle['throughput']:7.1f} {middle['per_user']:8.1f}"
                f" {middle['ttft_p50'] * 1e3:6.0f} ms {middle['ttft_p99'] * 1e3:4.0f} ms"
                f" {middle['tpot_p50'] * 1e3:6.1f} ms {middle['tpot_p99'] * 1e3:4.0f} ms"
                f" {f'{statistics.median(attained):.0%}' if attained else '':>10}"
                + (f"  {planned.cell}" if planned else "")
            )
    return "\n".join(lines)


_SHOWN = ("throughput", "per_user", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")


def planned_ratio(arms: dict[str, list[Round]]) -> harness.Ratio | None:
    """Throughput of the planned arm over that of the better other arm (by median); None without another arm."""
    throughput = {arm: [r.throughput for r in rounds] for arm, rounds in arms.items() if arm in ARMS}
    planned = throughput.pop("planned")
    if not throughput:
        return None
    return harness.ratio(planned, max(throughput.values(), key=statistics.median))


def plot(results: Results, figure: Figure) -> None:
    """Draw throughput over speed per user, a line per arm."""
    figure.set_size_inches(7, 4.5)
    axis = figure.subplots()
    for arm in next(iter(results.values())):
        speeds = [statistics.median(r.per_user for r in arms[arm]) for arms in results.values()]
        rates = [statistics.median(r.throughput for r in arms[arm]) for arms in results.values()]
        axis.plot(speeds, rates, "o-", label=arm)
        for concurrency, x, y in zip(results, speeds, rates, strict=True):
            axis.annotate(str(concurrency), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axis.set_xlabel("tokens/s per user (median)")
    axis.set_ylabel("tokens/s, all requests")
    axis.legend()
