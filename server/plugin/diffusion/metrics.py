"""Block diffusion in numbers, as Prometheus counters."""

from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from ..decode.buffered import BufferedMetrics

DEPTHS = 8
"""Accepted drafts in a row that are counted apart; further ones count as the last."""
PLANNED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
"""Buckets of D."""
TOTALS = ("forwards", "request_forwards", "tokens", "drafted", "accepted", "joined", "planned")


class DiffusionMetrics(BufferedMetrics):
    """Counts computed, drafted and accepted states of rounds. registry: other than the default only for tests. totals:
    the same since the start, by name; planned: open blocks with drafts decided by the planner."""

    def __init__(self, registry: CollectorRegistry = REGISTRY):
        super().__init__(registry)
        self.totals = dict.fromkeys(TOTALS, 0)
        counter = self.counter
        self.forwards = counter("outrider_diffusion_forwards", "Forwards of rounds with an open block.")
        self.request_forwards = counter(
            "outrider_diffusion_request_forwards", "Forwards summed over the open blocks in each."
        )
        self.tokens = counter("outrider_diffusion_tokens", "Tokens of complete blocks, including prompt tokens.")
        self.drafted = counter("outrider_drafted_states", "States of open blocks that were drafted.")
        accepted = Counter(
            "outrider_accepted_states",
            "Drafted states that were accepted, by steps ahead.",
            ("depth",),
            registry=registry,
        )
        self.accepted = [self.add(accepted.labels(str(depth))) for depth in range(1, DEPTHS + 1)]
        self.joined = counter(
            "outrider_joined_commits", "Blocks that were finished and followed by the next one in the same forward."
        )
        text = "D: states that the planner drafted of an open block in a forward."
        self.planned = self.histogram("outrider_planned_states", text, PLANNED)

    def observe(
        self, open_blocks: int, drafted: int, planned: Sequence[int], accepted: Sequence[int], joined: int, tokens: int
    ) -> None:
        """Count a round. drafted: states. planned: states of each open block that the planner decided on. accepted:
        accepted drafts of each open block."""
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
        self.flush_if_due()
