"""Block diffusion in numbers, as Prometheus counters."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ..decode.buffered import BufferedCounter, BufferedHistogram

DEPTHS = 8
"""Accepted drafts in a row that are told apart; further ones count as the last."""
PLANNED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
"""Buckets of D."""
FLUSH_SECONDS = 0.25
TOTALS = ("forwards", "request_forwards", "tokens", "drafted", "accepted", "joined", "planned")


class DiffusionMetrics:
    """Counts what rounds compute, draft and accept. registry: other than the default only for tests.

    totals: the same since the start, by name; planned: open blocks of which the planner decided what is drafted. What
    is counted is with Prometheus after `flush`, which comes by itself after FLUSH_SECONDS of rounds.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY):
        self.totals = dict.fromkeys(TOTALS, 0)
        self._flushed = time.monotonic()
        self._gathered: list[BufferedCounter | BufferedHistogram] = []

        def buffered(counter: Counter) -> BufferedCounter:
            self._gathered.append(metric := BufferedCounter(counter))
            return metric

        def counter(name: str, text: str) -> BufferedCounter:
            return buffered(Counter(name, text, registry=registry))

        self.forwards = counter("outrider_diffusion_forwards", "Forwards of rounds with an open block.")
        self.request_forwards = counter(
            "outrider_diffusion_request_forwards", "Forwards summed over the open blocks in each."
        )
        self.tokens = counter("outrider_diffusion_tokens", "Tokens of complete blocks, those of a prompt included.")
        self.drafted = counter("outrider_drafted_states", "States of open blocks that were drafted.")
        accepted = Counter(
            "outrider_accepted_states",
            "Drafted states that were accepted, by steps ahead.",
            ("depth",),
            registry=registry,
        )
        self.accepted = [buffered(accepted.labels(str(depth))) for depth in range(1, DEPTHS + 1)]
        self.joined = counter(
            "outrider_joined_commits", "Blocks that were finished and followed by the next one in the same forward."
        )
        text = "D: states that the planner drafted of an open block in a forward."
        self.planned = BufferedHistogram(Histogram("outrider_planned_states", text, buckets=PLANNED, registry=registry))
        self._gathered.append(self.planned)

    def observe(
        self, open_blocks: int, drafted: int, planned: Sequence[int], accepted: Sequence[int], joined: int, tokens: int
    ) -> None:
        """A round. drafted: states. planned: states of each open block of which the planner decided. accepted: of each
        open block, its accepted drafts."""
        if not open_blocks:
            return
        amounts = (1, open_blocks, tokens, drafted, sum(accepted), joined, len(planned))
        for name, amount in zip(TOTALS, amounts, strict=True):
            self.totals[name] += amount
        self.forwards.inc()
        self.request_forwards.inc(open_blocks)
        self.drafted.inc(drafted)
        for count in accepted:
            for depth in range(count):
                self.accepted[min(depth, DEPTHS - 1)].inc()
        for count in planned:
            self.planned.observe(count)
        self.joined.inc(joined)
        self.tokens.inc(tokens)
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Bring all counters up to date."""
        for metric in self._gathered:
            metric.flush()
        self._flushed = time.monotonic()
