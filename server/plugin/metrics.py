"""Speculation in numbers, as Prometheus counters and histograms (so that `rate()` works on them)."""

from __future__ import annotations

import torch
from prometheus_client import Counter, Histogram

from outrider.server.plugin.watch import AcceptanceWatch


class SpeculationMetrics:
    """Counts what decode steps draft, verify and accept.

    A position counts as verified only if every draft before it was accepted: what lies behind a rejection, or was
    not admitted, is unobserved and not rejected.
    """

    def __init__(self, gamma: int, drafter: str):
        self.watch = AcceptanceWatch(drafter)
        self.steps = Counter("outrider_decode_steps", "Decode steps of the engine.")
        self.request_steps = Counter("outrider_request_steps", "Decode steps summed over the requests in each.")
        self.drafted = Counter("outrider_drafted_tokens", "Tokens proposed by the drafter.")
        self.verified = Counter("outrider_verified_tokens", "Drafted tokens that the target verified.")
        self.accepted = Counter("outrider_accepted_tokens", "Drafted tokens that were accepted.")
        self.accepted_length = Histogram(
            "outrider_accepted_length",
            "Tokens committed per request and step, the bonus token included.",
            buckets=[float(n) for n in range(1, gamma + 2)],
        )
        self.positions = torch.arange(1, gamma + 1)
        verified = Counter("outrider_verified_position", "Drafts observed by the target, by position.", ["position"])
        accepted = Counter("outrider_accepted_position", "Drafts accepted, by position.", ["position"])
        self.verified_at = [verified.labels(k) for k in range(1, gamma + 1)]
        self.accepted_at = [accepted.labels(k) for k in range(1, gamma + 1)]

    def observe_step(self, draft_lens: torch.Tensor, verify_lens: torch.Tensor, accept_lens: torch.Tensor) -> None:
        """All [R]; accept_lens include the bonus token."""
        draft_lens, verify_lens, accept_lens = draft_lens.cpu(), verify_lens.cpu(), accept_lens.cpu()
        self.steps.inc()
        self.request_steps.inc(len(verify_lens))
        self.drafted.inc(int(draft_lens.sum()))
        self.verified.inc(int(verify_lens.sum()))
        self.accepted.inc(int(accept_lens.sum()) - len(accept_lens))
        for accept_len in accept_lens.tolist():
            self.accepted_length.observe(accept_len)
        observed = torch.minimum(verify_lens, accept_lens)
        _add(self.verified_at, (observed[:, None] >= self.positions).sum(0))
        _add(self.accepted_at, (accept_lens[:, None] - 1 >= self.positions).sum(0))
        self.watch.count(int((observed >= 1).sum()), int((accept_lens > 1).sum()))


def _add(counters: list[Counter], amounts: torch.Tensor) -> None:
    for counter, amount in zip(counters, amounts.tolist(), strict=True):
        if amount:
            counter.inc(amount)
