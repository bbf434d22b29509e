"""Alarm for a drafter whose tokens are almost never accepted.

A drafter that does not fit its target, or whose state went wrong, costs time without ever failing; elsewhere that has
gone unnoticed for weeks.
"""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Gauge

logger = logging.getLogger(__name__)


class AcceptanceAlarm:
    """Judges every `window` verified draft tokens by the share of first positions that were accepted.

    floor: below this share the drafter counts as collapsed; a fitting drafter is far above it, whatever the traffic.
    """

    def __init__(self, drafter: str, registry: CollectorRegistry, window: int = 4096, floor: float = 0.02):
        self.drafter, self.window, self.floor = drafter, window, floor
        self.verified = self.accepted = 0
        self.gauge = Gauge(
            "outrider_acceptance_collapsed",
            "1 while the drafter's tokens are almost never accepted.",
            multiprocess_mode="livemax",  # of several engines, one is enough
            registry=registry,
        )
        self.gauge.set(0)

    def count(self, verified: int, accepted: int) -> None:
        """First-position drafts of one step: how many were verified, how many accepted."""
        self.verified += verified
        self.accepted += accepted
        if self.verified < self.window:
            return
        share = self.accepted / self.verified
        self.gauge.set(share < self.floor)
        if share < self.floor:
            logger.warning(
                "only %.1f %% of the last %d first drafts were accepted: the drafter (%s) does not fit this model or "
                "this traffic. Answers stay right, but speculation costs time; --drafter ngram or off avoids that.",
                100 * share,
                self.verified,
                self.drafter,
            )
        self.verified = self.accepted = 0
