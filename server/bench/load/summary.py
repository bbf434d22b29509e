"""Summary of the requests at one load: rates, percentiles, goodput, failures."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from .generate import Record
from .scenario import Objectives

PERCENTILES = (50, 90, 95, 99)
PROMPTS = (256, 1024, 4096)
"""Most prompt tokens of each class but the last."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of times, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """None without times."""
        if not values:
            return None
        p50, p90, p95, p99 = (float(p) for p in np.percentile(values, PERCENTILES))
        return cls(float(np.mean(values)), p50, p90, p95, p99, max(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """One load. load: requests in flight, requests per second, or a trace's speed.

    asked: requests due in the measured time. whole: the part answered to the end; all times, token counts and speeds
    are of whole answers, None without any.
    failures: the rest, by HTTP status or kind of failure.
    throughput: output tokens per second in the measured time, also of warm-up requests; an answer's tokens are spread
    evenly from its first to its last. requests_per_second: requests that end in the measured time.
    with_prompts: throughput plus prompt tokens, spread evenly from the due time to the first output token.
    per_user: tokens per second of one answer after its first token, median.
    gap: between pieces of an answer at the client. ttft_by_prompt: by prompt tokens, see PROMPTS.
    goodput: whole answers per second that kept every objective and their service level. good: their share of all
    requests due. None without objectives.
    level_kept: of the requests with a service level, the share that got it after the first token; None without levels.
    late: delay of sending after the due time, 99th percentile.
    processor_ms: milliseconds of processor time per token of the server's processes except the learner, warm-up
    included; None for a server on another machine.
    Only for an engine of our own:
    counts: `tau`, tokens per request and step, and counts of drafts. differ: answers unlike the first arm's.
    """

    load: float
    seconds: float
    asked: int
    whole: int
    failures: dict[str, int]
    throughput: float
    with_prompts: float
    requests_per_second: float
    per_user: float | None
    input_tokens: float | None
    output_tokens: float | None
    ttft: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    gap: Spread | None
    ttft_by_prompt: dict[str, Spread]
    goodput: float | None
    good: float | None
    level_kept: float | None
    late: float
    processor_ms: float | None = None
    counts: dict[str, Any] | None = None
    differ: int | None = None


Results = dict[float, dict[str, list[Summary]]]
"""{load: {arm: [one per round]}}"""


def summarise(
    records: Sequence[Record],
    load: float,
    warm_up: float,
    seconds: float,
    objectives: Objectives,
    processor_seconds: float | None = None,
) -> Summary:
    """Summary of the records at one load that were due after the warm-up.

    processor_seconds: processor time of the server's processes for all records.
    """
    tokens = sum(record.reply.completion_tokens for record in records)
    measured = [record for record in records if record.due >= warm_up]
    whole = [record for record in measured if not record.reply.failure]
    spoken = [record for record in whole if record.reply.completion_tokens > 1]
    failures = Counter(record.reply.failure for record in measured if record.reply.failure)
    good = sum(r.level_kept and objectives.kept(r.ttft, r.reply.tpot, r.e2e) for r in whole)
    with_level = [record.level_kept for record in measured if record.level]
    window = (warm_up, warm_up + seconds)
    tpot = [record.reply.tpot for record in spoken]
    answered = [record for record in records if not record.reply.failure]
    outputs = ((r.reply.completion_tokens, r.due + r.ttft, r.end) for r in answered)
    throughput = sum(_within(*output, *window) for output in outputs) / seconds
    prompts = sum(_within(r.reply.prompt_tokens, r.due, r.due + r.ttft, *window) for r in answered) / seconds
    return Summary(
        load=load,
        seconds=seconds,
        asked=len(measured),
        whole=len(whole),
        failures=dict(failures),
        throughput=throughput,
        with_prompts=throughput + prompts,
        requests_per_second=sum(window[0] <= record.end < window[1] for record in answered) / seconds,
        per_user=1 / float(np.median(tpot)) if tpot and np.median(tpot) > 0 else None,
        input_tokens=float(np.mean([record.reply.prompt_tokens for record in whole])) if whole else None,
        output_tokens=float(np.mean([record.reply.completion_tokens for record in whole])) if whole else None,
        ttft=Spread.of([record.ttft for record in whole]),
        tpot=Spread.of(tpot),
        e2e=Spread.of([record.e2e for record in whole]),
        gap=Spread.of([gap for record in whole for gap in record.reply.gaps]),
        ttft_by_prompt=_by_prompt(whole),
        goodput=good / seconds if objectives else None,
        good=good / len(measured) if objectives and measured else None,
        level_kept=float(np.mean(with_level)) if with_level else None,
        late=float(np.percentile([record.late for record in measured], 99)) if measured else 0.0,
        processor_ms=processor_seconds * 1e3 / tokens if processor_seconds is not None and tokens else None,
    )


def _within(tokens: int, first: float, last: float, begin: float, end: float) -> float:
    """Return how many of `tokens`, spread evenly from `first` to `last`, fall between `begin` and `end`."""
    if last - first <= 0:
        return tokens if begin <= last < end else 0.0
    return tokens * max(0.0, min(last, end) - max(first, begin)) / (last - first)


def _by_prompt(records: Sequence[Record]) -> dict[str, Spread]:
    """Times to the first token by class of prompt; a class is named by its most tokens."""
    names = [*(f"to {most}" for most in PROMPTS), f"over {PROMPTS[-1]}"]
    times: dict[str, list[float]] = {name: [] for name in names}
    for record in records:
        times[names[bisect_left(PROMPTS, record.reply.prompt_tokens)]].append(record.ttft)
    return {name: spread for name, values in times.items() if (spread := Spread.of(values))}
