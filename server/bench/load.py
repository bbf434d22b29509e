"""Throughput and latency under load: without speculation, verifying every draft, and as the planner decides.

Every arm runs on the same engine, which tells them apart by an option of each request; the arms take turns, round by
round. So many requests run at a time as --concurrency says: as one ends, the next begins. Prompts of several files are
mixed. With --level a third of the requests asks for a minimum speed, and a second table says how many got it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.server.engine import client, session
from outrider.server.engine.flags import add_engine_flags, settings_of
from outrider.server.engine.questions import read_questions
from outrider.server.engine.resolve import resolve
from outrider.server.errors import UserError
from outrider.server.plugin.options import RequestOptions

if TYPE_CHECKING:
    from outrider.server.engine.engine import Engine

ARMS = {
    "off": RequestOptions(enabled=False),
    "verify all": RequestOptions(planned=False),
    "planned": RequestOptions(),
}
LEVELLED = 3
"""Every third request carries the service level."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: tokens it got, seconds to the first and to the last; whether it is one that has a level."""

    tokens: int
    first: float
    last: float
    levelled: bool

    @property
    def seconds_per_token(self) -> float:
        """TPOT, after the first token."""
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Round:
    """One arm at one concurrency, once. Speeds in tokens/s, times in seconds.

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
    def of(cls, answers: Sequence[Answered], seconds: float, level: float | None) -> Round:
        """Sum up the answers that took `seconds` together."""
        ttft = np.array([a.first for a in answers])
        tpot = np.array([a.seconds_per_token for a in answers])
        levelled = [1 / a.seconds_per_token >= level for a in answers if a.levelled] if level else []
        return cls(
            throughput=sum(a.tokens for a in answers) / seconds,
            per_user=1 / float(np.median(tpot)),
            ttft_p50=float(np.percentile(ttft, 50)),
            ttft_p99=float(np.percentile(ttft, 99)),
            tpot_p50=float(np.percentile(tpot, 50)),
            tpot_p99=float(np.percentile(tpot, 99)),
            attained=statistics.mean(levelled) if levelled else None,
        )


Results = dict[int, dict[str, list[Round]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=True)
    add = parser.add_argument
    add("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help="JSON lines, as for bench accept")
    add("--concurrency", default="1,2,4,8,16,32", metavar="LIST", help="requests at a time (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="(default: %(default)g)")
    add("--count", type=int, default=8, metavar="N", help="requests per round, at least; never less than two each")
    add("--new-tokens", type=int, default=128, metavar="N", help="of each answer, at most (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="repetitions of each arm (default: %(default)s)")
    add("--arms", nargs="+", choices=[*ARMS], default=[*ARMS], help="(default: all)")
    add("--level", type=float, metavar="X", help="tokens/s that every third request asks for; adds an arm without it")
    add("--json", type=Path, metavar="FILE", help="write every measurement there as well")
    add("--plot", type=Path, metavar="PNG", help="draw throughput over speed per user")


def run(args: argparse.Namespace) -> int:
    try:
        concurrencies = [int(part) for part in args.concurrency.split(",")]
    except ValueError:
        raise UserError(f"--concurrency is a list like 1,8, not {args.concurrency!r}") from None
    if min(args.count, args.new_tokens, args.rounds, *concurrencies) < 1:
        raise UserError("--count, --new-tokens, --rounds and --concurrency are at least 1")
    if args.level is not None and args.level <= 0:
        raise UserError("--level is a number of tokens per second above 0")
    files = [read_questions(path) for path in args.prompts]
    questions = [file[i % len(file)] for i in range(max(map(len, files))) for file in files]
    settings = settings_of(args, disable_radix_cache=True, max_running_requests=max(concurrencies))

    async def measurement(engine: Engine) -> Results:
        return await _measure(engine.tokenizer_manager, questions, concurrencies, args)

    results = session.run(resolve(settings), measurement)
    print(table(results))
    if args.json:
        plain = {c: {arm: [asdict(r) for r in rounds] for arm, rounds in arms.items()} for c, arms in results.items()}
        args.json.write_text(json.dumps(plain, indent=1) + "\n")
    if args.plot and not plot(results, args.plot):
        print("matplotlib is not installed: no picture")
    return 0


async def _measure(
    manager: Any, questions: Sequence[str], concurrencies: Sequence[int], args: argparse.Namespace
) -> Results:
    from tqdm import tqdm

    arms = {name: ARMS[name] for name in args.arms}
    if args.level and "planned" in arms:
        arms["no levels"] = arms["planned"]
    results: Results = {c: {arm: [] for arm in arms} for c in concurrencies}
    load = Load(manager, args.temperature, args.new_tokens, args.level)
    await load.run(questions[:2], 1, RequestOptions(), told=False)  # warm
    with tqdm(total=args.rounds * len(concurrencies) * len(arms), unit="arm") as progress:
        for number in range(args.rounds):
            for concurrency, rounds in results.items():
                count = max(args.count, 2 * concurrency)
                chosen = [questions[(number * count + i) % len(questions)] for i in range(count)]
                turn = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
                for arm in turn:
                    progress.set_postfix_str(f"{arm} at {concurrency}")
                    rounds[arm].append(await load.run(chosen, concurrency, arms[arm], told=arm == "planned"))
                    progress.update()
    return results


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of requests; level: tokens/s that every third one asks for, where the arm is told so."""

    manager: Any
    temperature: float
    new_tokens: int
    level: float | None

    async def run(self, questions: Sequence[str], concurrency: int, options: RequestOptions, *, told: bool) -> Round:
        """Answer the questions, `concurrency` at a time."""
        gate = asyncio.Semaphore(concurrency)

        async def ask(index: int, question: str) -> Answered:
            async with gate:
                return await self._answer(question, options, index % LEVELLED == 0, told)

        start = time.perf_counter()
        answers = await asyncio.gather(*(ask(i, q) for i, q in enumerate(questions)))
        return Round.of(answers, time.perf_counter() - start, self.level)

    async def _answer(self, question: str, options: RequestOptions, levelled: bool, told: bool) -> Answered:
        from sglang.srt.managers.io_struct import GenerateReqInput

        if levelled and told and self.level:
            options = replace(options, min_tokens_per_second=self.level)
        request = GenerateReqInput(
            input_ids=client.chat_ids(self.manager, question),
            sampling_params={
                "temperature": self.temperature,
                "max_new_tokens": self.new_tokens,
                "custom_params": options.to_custom_params(),
            },
            stream=True,
        )
        began, first, tokens = time.perf_counter(), 0.0, 0
        async for piece in self.manager.generate_request(request):
            tokens = piece["meta_info"]["completion_tokens"]
            first = first or time.perf_counter() - began
        return Answered(tokens, first, time.perf_counter() - began, levelled)


def table(results: Results) -> str:
    """One row per concurrency and arm, with the arm's throughput over that of the better of the other two arms."""
    lines = [
        f"{'requests':>8} {'arm':>10} {'tok/s':>7} {'per user':>8} {'TTFT p50':>9} {'p99':>7} {'TPOT p50':>9}"
        f" {'p99':>7} {'level kept':>10}  planned over the better of the others"
    ]
    for concurrency, arms in results.items():
        for arm, rounds in arms.items():
            middle = {name: statistics.median(getattr(r, name) for r in rounds) for name in _SHOWN}
            kept = [r.attained for r in rounds if r.attained is not None]
            lines.append(
                f"{concurrency:>8} {arm:>10} {middle['throughput']:7.1f} {middle['per_user']:8.1f}"
                f" {middle['ttft_p50'] * 1e3:6.0f} ms {middle['ttft_p99'] * 1e3:4.0f} ms"
                f" {middle['tpot_p50'] * 1e3:6.1f} ms {middle['tpot_p99'] * 1e3:4.0f} ms"
                f" {f'{statistics.median(kept):.0%}' if kept else '':>10}"
                + (_ratio_text(arms) if arm == "planned" else "")
            )
    return "\n".join(lines)


_SHOWN = ("throughput", "per_user", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")


def ratios(arms: dict[str, list[Round]]) -> list[float]:
    """Throughput of the planned arm over that of the better other arm (by median), one per round."""
    others = [arm for arm in arms if arm in ARMS and arm != "planned"]
    best = max(others, key=lambda arm: statistics.median(r.throughput for r in arms[arm]))
    return [ours.throughput / other.throughput for ours, other in zip(arms["planned"], arms[best], strict=True)]


def _ratio_text(arms: dict[str, list[Round]]) -> str:
    if not any(arm in arms for arm in ARMS if arm != "planned"):
        return ""
    found = sorted(ratios(arms))
    return f"  {statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def plot(results: Results, picture: Path) -> bool:
    """Draw throughput over speed per user, a line per arm; False when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for arm in next(iter(results.values())):
        speeds = [statistics.median(r.per_user for r in arms[arm]) for arms in results.values()]
        rates = [statistics.median(r.throughput for r in arms[arm]) for arms in results.values()]
        axis.plot(speeds, rates, "o-", label=arm)
        for concurrency, x, y in zip(results, speeds, rates, strict=True):
            axis.annotate(str(concurrency), (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axis.set_xlabel("tokens/s per user (median)")
    axis.set_ylabel("tokens/s, all requests")
    axis.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return True
