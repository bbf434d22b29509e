"""Speculation in numbers, as Prometheus counters and histograms (so that `rate()` works on them)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import Counter, Histogram

from outrider.scheduler.service_levels import goodput, met
from outrider.server.plugin.decode.collapse import AcceptanceWatch

if TYPE_CHECKING:
    from outrider.server.plugin.decode.planning import Step

CALIBRATION_BINS = 10
FLUSH_SECONDS = 0.25
STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
PLANNER_BUCKETS = (2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3)


class SpeculationMetrics:
    """Counts what decode steps draft, verify and accept, and what the planner expected of them.

    A position counts as verified only if every draft before it was accepted: what lies behind a rejection, or was
    not admitted, is unobserved and not rejected.
    """

    def __init__(self, gamma: int, drafter: str):
        self.watch = AcceptanceWatch(drafter)
        self.steps = Counter("outrider_decode_steps", "Decode steps of the engine.")
        self.undrafted_steps = Counter("outrider_undrafted_steps", "Decode steps that ran without drafting.")
        self.request_steps = Counter("outrider_request_steps", "Decode steps summed over the requests in each.")
        self.drafted = Counter("outrider_drafted_tokens", "Tokens proposed by the drafter.")
        self.budget = Counter(
            "outrider_budget_tokens", "Drafted tokens that the planner allowed, where it set a bound."
        )
        self.verified = Counter("outrider_verified_tokens", "Drafted tokens that the target verified.")
        self.accepted = Counter("outrider_accepted_tokens", "Drafted tokens that were accepted.")
        self.wasted = Counter("outrider_wasted_tokens", "Drafted tokens that were verified and not accepted.")
        self.accepted_length = Histogram(
            "outrider_accepted_length",
            "Tokens committed per request and step, the bonus token included.",
            buckets=[float(n) for n in range(1, gamma + 2)],
        )
        self.step_seconds = Histogram(
            "outrider_step_seconds", "Time from one decode step to the next.", buckets=STEP_BUCKETS
        )
        self.predicted_seconds = Counter(
            "outrider_predicted_step_seconds", "Predicted time of the steps in outrider_predictable_step_seconds."
        )
        self.predictable_seconds = Counter(
            "outrider_predictable_step_seconds", "Time of the decode steps whose time was predicted."
        )
        self.prediction_error_seconds = Counter(
            "outrider_step_prediction_error_seconds", "Absolute differences between predicted and taken time."
        )
        self.draft_seconds = Counter("outrider_draft_seconds", "Time spent drafting, on the host's clock.")
        self.planner_seconds = Histogram(
            "outrider_planner_seconds", "Time of the planner per decode step.", buckets=PLANNER_BUCKETS
        )
        self.levels = Counter(
            "outrider_service_level_requests", "Finished requests that asked for a minimum speed.", ["met"]
        )
        self.goodput = Counter("outrider_goodput_tokens", "Tokens of finished requests that met their service level.")
        self.positions = np.arange(1, gamma + 1)
        verified = Counter("outrider_verified_position", "Drafts observed by the target, by position.", ["position"])
        accepted = Counter("outrider_accepted_position", "Drafts accepted, by position.", ["position"])
        expected = Counter(
            "outrider_expected_position", "Sum of the confidences of the drafts observed, by position.", ["position"]
        )
        self.verified_at = [verified.labels(k) for k in self.positions]
        self.accepted_at = [accepted.labels(k) for k in self.positions]
        self.expected_at = [expected.labels(k) for k in self.positions]
        # ECE over a time range: sum over bins of |increase(expected) - increase(accepted)| / sum of increase(observed).
        names = [f"{(b + 0.5) / CALIBRATION_BINS:.2f}" for b in range(CALIBRATION_BINS)]
        observed = Counter("outrider_calibration_observed", "Drafts observed, by confidence bin.", ["confidence"])
        kept = Counter("outrider_calibration_accepted", "Drafts accepted, by confidence bin.", ["confidence"])
        hoped = Counter("outrider_calibration_expected", "Sum of confidences, by confidence bin.", ["confidence"])
        self.observed_bin = [observed.labels(name) for name in names]
        self.accepted_bin = [kept.labels(name) for name in names]
        self.expected_bin = [hoped.labels(name) for name in names]
        # What these fifty counters are behind by: written one by one at every step they would cost a percent of it.
        self.by_position = np.zeros((3, gamma))
        self.by_bin = np.zeros((3, CALIBRATION_BINS))
        self.flushed = time.monotonic()

    def observe_step(
        self,
        step: Step,
        confidence: np.ndarray,
        draft_lens: np.ndarray,
        verify_lens: np.ndarray,
        accept_lens: np.ndarray,
    ) -> None:
        """confidence [R, gamma], calibrated; the others [R]; accept_lens include the bonus token."""
        requests, verified = len(verify_lens), int(verify_lens.sum())
        accepted = int(accept_lens.sum()) - requests
        self.steps.inc()
        self.request_steps.inc(requests)
        self.drafted.inc(int(draft_lens.sum()))
        self.verified.inc(verified)
        self.accepted.inc(accepted)
        self.wasted.inc(verified - accepted)
        if not step.drafts:
            self.undrafted_steps.inc()
        if step.budget.tokens is not None:
            self.budget.inc(step.budget.tokens)
        for accept_len in accept_lens.tolist():
            self.accepted_length.observe(accept_len)
        self.draft_seconds.inc(step.draft_seconds)
        self.planner_seconds.observe(step.planner_seconds)
        if verified:
            self._observe_positions(confidence, verify_lens, accept_lens)

    def _observe_positions(self, confidence: np.ndarray, verify_lens: np.ndarray, accept_lens: np.ndarray) -> None:
        observed = np.minimum(verify_lens, accept_lens)[:, None] >= self.positions
        kept = accept_lens[:, None] - 1 >= self.positions
        self.by_position += observed.sum(0), kept.sum(0), (confidence * observed).sum(0)
        seen, outcome = confidence[observed], kept[observed]
        bins = np.minimum((seen * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
        for row, weights in enumerate((None, outcome, seen)):
            self.by_bin[row] += np.bincount(bins, weights, minlength=CALIBRATION_BINS)
        self.watch.count(int(observed[:, 0].sum()), int(kept[:, 0].sum()))
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Bring the counters by position and by confidence up to date."""
        for counters, amounts in zip(
            (self.verified_at, self.accepted_at, self.expected_at), self.by_position, strict=True
        ):
            _add(counters, amounts)
        for counters, amounts in zip(
            (self.observed_bin, self.accepted_bin, self.expected_bin), self.by_bin, strict=True
        ):
            _add(counters, amounts)
        self.by_position[:] = 0
        self.by_bin[:] = 0
        self.flushed = time.monotonic()

    def observe_requests(self, levels: np.ndarray, speeds: np.ndarray, tokens: np.ndarray) -> None:
        """Finished requests [M]: tokens/s asked for (0: none) and had, and tokens."""
        reached = met(levels, speeds)
        for outcome in (True, False):
            if count := int((reached[levels > 0] == outcome).sum()):
                self.levels.labels(str(outcome).lower()).inc(count)
        self.goodput.inc(goodput(levels, speeds, tokens))

    def observe_time(self, seconds: float, predicted: float | None) -> None:
        """How long a decode step took, and what the cost model had said it would; None without a cost model."""
        self.step_seconds.observe(seconds)
        if predicted is not None:
            self.predicted_seconds.inc(predicted)
            self.predictable_seconds.inc(seconds)
            self.prediction_error_seconds.inc(abs(predicted - seconds))


def _add(counters: list[Counter], amounts: np.ndarray) -> None:
    for counter, amount in zip(counters, amounts.tolist(), strict=True):
        if amount:
            counter.inc(amount)
