"""Counters of draft tokens by position and by confidence, for each separately calibrated class of drafts."""

import logging

import numpy as np
from prometheus_client import CollectorRegistry, Gauge

from outrider.scheduler.calibration.classes import CLASSES, SAMPLING, SOURCES

from .buffered import BufferedTable

logger = logging.getLogger(__name__)

CALIBRATION_BINS = 10
MOST = 64
"""Most steps that are gathered before a flush."""


class AcceptanceCounters:
    """Counts the draft tokens that the target observed and accepted, and the acceptances that were expected.

    A position counts as verified only if every draft token before it was accepted. Tokens after a rejection, and
    tokens that were not admitted, are unobserved: they do not count as rejected.
    """

    def __init__(self, gamma: int, drafter: str, registry: CollectorRegistry):
        self.watch = AcceptanceAlarm(drafter, registry)
        self.positions = np.arange(1, gamma + 1)
        self._waiting: list[tuple[np.ndarray, ...]] = []
        classes = {"sampling": SAMPLING, "source": SOURCES}
        self.by_position = BufferedTable(
            {
                "outrider_verified_position": "Drafts observed by the target, by position.",
                "outrider_accepted_position": "Drafts accepted, by position.",
                "outrider_expected_position": "Sum of the confidences of the drafts observed, by position.",
            },
            classes | {"position": [str(k) for k in self.positions]},
            registry,
        )
        # ECE over a time range: sum over bins of |increase(expected) - increase(accepted)| / sum of increase(observed).
        self.by_bin = BufferedTable(
            {
                "outrider_calibration_observed": "Drafts observed, by confidence bin.",
                "outrider_calibration_accepted": "Drafts accepted, by confidence bin.",
                "outrider_calibration_expected": "Sum of confidences, by confidence bin.",
            },
            classes | {"confidence": [f"{(b + 0.5) / CALIBRATION_BINS:.2f}" for b in range(CALIBRATION_BINS)]},
            registry,
        )

    def observe(
        self, confidence: np.ndarray, classes: np.ndarray, verify_lens: np.ndarray, accept_lens: np.ndarray
    ) -> None:
        """Count a step. confidence: [R, gamma], calibrated. Other arrays: [R]. accept_lens: with the target's token.

        Up to `MOST` steps are counted together, because each call costs more than its few numbers.
        """
        self._waiting.append((confidence, classes, verify_lens, accept_lens))
        if len(self._waiting) >= MOST:
            self._count()

    def _count(self) -> None:
        confidence, classes, verify_lens, accept_lens = (
            np.concatenate(part) for part in zip(*self._waiting, strict=True)
        )
        self._waiting = []
        observed = np.minimum(verify_lens, accept_lens)[:, None] >= self.positions
        seen, outcome = confidence[observed], (accept_lens[:, None] - 1 >= self.positions)[observed]
        request, position = observed.nonzero()
        bins = np.minimum((seen * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
        for table, place, values in (
            (self.by_position, position, len(self.positions)),
            (self.by_bin, bins, CALIBRATION_BINS),
        ):
            column = classes[request] * values + place
            for row, weights in enumerate((None, outcome, seen)):
                table.amounts[row] += np.bincount(column, weights, minlength=len(CLASSES) * values)
        first = position == 0
        self.watch.count(int(np.count_nonzero(first)), int(np.count_nonzero(outcome[first])))

    def flush(self) -> None:
        if self._waiting:
            self._count()
        self.by_position.flush()
        self.by_bin.flush()


class AcceptanceAlarm:
    """Alarm for a drafter that does not fit its target, or has a corrupt state: it costs time but never fails.

    After every `window` verified drafts it checks the share of accepted first tokens. floor: below this share the
    drafter counts as collapsed; a fitting drafter is far above it with any traffic.
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
        """Count first-position drafts of a step, verified and accepted."""
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
