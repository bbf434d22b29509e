"""Block diffusion in numbers, as Prometheus counters."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter

DEPTHS = 8
"""Accepted drafts in a row that are told apart; further ones count as the last."""


TOTALS = ("forwards", "request_forwards", "tokens", "drafted", "accepted", "joined")


class DiffusionMetrics:
    """Counts what rounds compute, draft and accept. registry: other than the default only for tests.

    totals: the same since the start, by name.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY):
        self.totals = dict.fromkeys(TOTALS, 0)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.forwards = counter("outrider_diffusion_forwards", "Forwards of rounds with an open block.")
        self.request_forwards = counter(
            "outrider_diffusion_request_forwards", "Forwards summed over the open blocks in each."
        )
        self.tokens = counter("outrider_diffusion_tokens", "Tokens of complete blocks, those of a prompt included.")
        self.drafted = counter("outrider_drafted_states", "States of open blocks that were drafted.")
        accepted = counter("outrider_accepted_states", "Drafted states that were accepted, by steps ahead.", ("depth",))
        self.accepted = [accepted.labels(str(depth)) for depth in range(1, DEPTHS + 1)]
        self.joined = counter(
            "outrider_joined_commits", "Blocks that were finished and followed by the next one in the same forward."
        )

    def observe(self, open_blocks: int, drafted: int, accepted: Sequence[int], joined: int, tokens: int) -> None:
        """A round. accepted: of each open block, its accepted drafts."""
        if not open_blocks:
            return
        for name, amount in zip(TOTALS, (1, open_blocks, tokens, drafted, sum(accepted), joined), strict=True):
            self.totals[name] += amount
        self.forwards.inc()
        self.request_forwards.inc(open_blocks)
        self.drafted.inc(drafted)
        for count in accepted:
            for depth in range(count):
                self.accepted[min(depth, DEPTHS - 1)].inc()
        self.joined.inc(joined)
        self.tokens.inc(tokens)
