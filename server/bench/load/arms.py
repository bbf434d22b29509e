"""Throughput and latency of an engine of our own. Its arms take turns; an arm is a set of request options.

The worker's counters also give the tokens per request and step, and acceptance by position.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.drafters.acceptance import Acceptance, acceptance_table

from ...errors import UserError
from ...plugin import worker_rpc
from ...plugin.options import RequestOptions
from ...processes import client, session
from ...prompt_files import read_mixed_questions
from ...settings.flags import settings_of
from ...settings.resolve import Resolved, resolve
from .. import harness, record
from ..remote import Reply
from . import report
from .generate import Record
from .scenario import UNITS, Objectives
from .summary import Results, Summary, summarise

if TYPE_CHECKING:
    from ...processes.engine import Engine

ARMS = {"off": RequestOptions(enabled=False), "verify all": RequestOptions(planned=False), "planned": RequestOptions()}
ACROSS = {"across": RequestOptions(corpus="")}
"""An arm that runs only if named: planned, with lookup in the texts of its round."""
DIFFUSION_ARMS = {
    "off": RequestOptions(enabled=False),
    **{f"D={states}": RequestOptions(gamma=states, planned=False) for states in range(4)},
    "planned": RequestOptions(),
}
"""Arms of a block-diffusion model. D=0 prepares the drafts' tokens but drafts no states."""
LEVEL_EVERY = 3
"""Every third request has a service level."""
CONCURRENCY = "1,2,4,8,16,32"
NEW_TOKENS = 128
ROUNDS = 3


def run(args: argparse.Namespace) -> Results:
    """Start an engine, let the arms take turns on it; print and write the results."""
    from ...tune.measure import measure_first

    if not args.prompts:
        raise UserError("--prompts FILE… is needed without --url")
    concurrencies = harness.positive_integers("--concurrency", args.concurrency or CONCURRENCY)
    new_tokens = harness.length_range("--new-tokens", args.new_tokens or str(NEW_TOKENS))
    harness.check_positive(args, "count")
    if args.level is not None and args.level <= 0:
        raise UserError("--level is a number of tokens per second above 0")
    questions = read_mixed_questions(args.prompts)
    resolved = resolve(settings_of(args, disable_radix_cache=True, max_running_requests=max(concurrencies)))
    arms = _arms(args, resolved)

    async def measurement(engine: Engine) -> Results:
        await measure_first(engine, resolved, harness.log)
        load = Load(engine.tokenizer_manager, resolved, args.temperature or 0.0, new_tokens, args.level)
        return await _measure(load, questions, concurrencies, arms, args)

    results = session.run(resolved, measurement)
    report.show(results, UNITS["closed"], args.plot)
    if accepted := acceptance_of(results):
        print(acceptance_table(accepted))
    record.write(args.json, "load", report.named(results), resolved=resolved)
    return results


def _arms(args: argparse.Namespace, resolved: Resolved) -> dict[str, RequestOptions]:
    usual = ARMS if resolved.settings.diffusion is None else DIFFUSION_ARMS
    known = usual if resolved.settings.diffusion is not None else ARMS | ACROSS
    if unknown := [arm for arm in args.arms or () if arm not in known]:
        raise UserError(f"--arms of this model are {', '.join(known)}, not {', '.join(unknown)}")
    arms = {name: known[name] for name in args.arms or usual}
    if args.level and report.OURS in arms:
        arms[report.ALSO_OURS] = arms[report.OURS]
    return arms


async def _measure(
    load: Load,
    questions: Sequence[str],
    concurrencies: Sequence[int],
    arms: Mapping[str, RequestOptions],
    args: argparse.Namespace,
) -> Results:
    results: Results = {concurrency: {arm: [] for arm in arms} for concurrency in concurrencies}
    texts: dict[tuple[int, int], list[str]] = {}
    for options in arms.values():  # warm up
        await load.run(questions[:2], 1, options, ask_level=False)
    for number, concurrency, arm in harness.alternate_arms(args.rounds or ROUNDS, concurrencies, list(arms)):
        count = max(args.count, 2 * concurrency)
        chosen = [questions[(number * count + i) % len(questions)] for i in range(count)]
        options = arms[arm]
        if options.corpus is not None:  # other rounds and loads have the same texts
            options = replace(options, corpus=f"round {number} of {concurrency}")
        summary, answers = await load.run(chosen, concurrency, options, ask_level=arm == report.OURS)
        if not load.temperature:  # a sampled answer may differ
            first = texts.setdefault((number, concurrency), answers)
            summary = replace(summary, differ=sum(a != b for a, b in zip(first, answers, strict=True)))
        results[concurrency][arm].append(summary)
    return results


@dataclass(frozen=True, slots=True)
class Load:
    """Settings that all requests share.

    new_tokens: least and most tokens of an answer, drawn by the request's number. level: service level of every third
    request, in tokens per second.
    """

    manager: Any
    resolved: Resolved
    temperature: float
    new_tokens: tuple[int, int]
    level: float | None

    async def run(
        self, questions: Sequence[str], concurrency: int, options: RequestOptions, *, ask_level: bool
    ) -> tuple[Summary, list[str]]:
        """Answer the questions in a closed loop; also returns the texts. ask_level: requests send their level."""
        before, start = await self._counts(), time.perf_counter()

        async def ask(numbered: tuple[int, str]) -> Record:
            index, question = numbered
            level = None if index % LEVEL_EVERY else self.level
            due = time.perf_counter() - start
            most = random.Random(index).randint(*self.new_tokens)
            asked = level if ask_level else None
            reply = await self._answer(question, most, replace(options, min_tokens_per_second=asked))
            return Record("", due, 0.0, reply, level)

        records, seconds = await harness.closed_loop(ask, enumerate(questions), concurrency)
        summary = summarise(records, concurrency, 0.0, seconds, Objectives())
        counts = _counted(before, await self._counts())
        return replace(summary, counts=counts), [one.reply.text for one in records]

    async def _answer(self, question: str, most: int, options: RequestOptions) -> Reply:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=client.chat_ids(self.manager, question),
            sampling_params={
                "temperature": self.temperature,
                "max_new_tokens": most,
                "custom_params": options.to_custom_params(),
            },
            stream=True,
        )
        start, last, reply = time.perf_counter(), 0.0, Reply()
        async for piece in self.manager.generate_request(request):
            now, about = time.perf_counter() - start, piece["meta_info"]
            reply.ttft = reply.ttft or now
            if last:
                reply.gaps.append(now - last)
            last = now
            reply.text, reply.completion_tokens = piece["text"], about["completion_tokens"]
            reply.prompt_tokens = about["prompt_tokens"]
        reply.seconds = time.perf_counter() - start
        return reply

    async def _counts(self) -> Acceptance | dict[str, int]:
        """The worker's counts of drafts, or of block diffusion, since its start."""
        settings = self.resolved.settings
        if settings.diffusion is not None:
            engines = [live["diffusion"] for live in await worker_rpc.read_live(self.manager)]
            return {name: sum(engine[name] for engine in engines) for name in engines[0]}
        await worker_rpc.read(self.manager)  # updates its counters
        from prometheus_client import CollectorRegistry, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        samples = [sample for metric in registry.collect() for sample in metric.samples]

        def value(name: str, **labels: str) -> int:
            return int(sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items()))

        positions = [str(k) for k in range(1, settings.plugin_config.longest + 1)]
        return Acceptance(
            cycles=value("outrider_request_steps_total"),
            tokens=value("outrider_accepted_length_sum"),
            tried=tuple(value("outrider_verified_position_total", position=k) for k in positions),
            kept=tuple(value("outrider_accepted_position_total", position=k) for k in positions),
        )


def _counted(before: Any, after: Any) -> dict[str, Any]:
    """Difference of two readings of the counters, with tau."""
    if isinstance(after, Acceptance):
        found = after - before
        return {"cycles": found.cycles, "tokens": found.tokens, **found.counts()}
    more = {name: after[name] - before[name] for name in after}
    return more | {"tau": more["tokens"] / more["request_forwards"] if more["request_forwards"] else 0.0}


def acceptance_of(results: Results) -> dict[str, Acceptance]:
    """Acceptance by arm over all rounds and loads, for arms with drafts."""
    found: dict[str, Acceptance] = {}
    for arms in results.values():
        for arm, rounds in arms.items():
            for counts in (one.counts for one in rounds):
                if counts and any(counts.get("tried", ())):
                    one = Acceptance(*(counts[name] for name in ("cycles", "tokens", "tried", "kept")))
                    found[arm] = found[arm] + one if arm in found else one
    return found
