"""Speculation in numbers, as Prometheus counters and histograms (so that `rate()` works on them)."""

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from ..buckets import TOKEN_SECONDS
from .acceptance_counters import AcceptanceCounters
from .buffered import BufferedMetrics
from .step import Step

PLANNER_BUCKETS = (2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)


class SpeculationMetrics(BufferedMetrics):
    """Counts tokens drafted, verified and accepted by decode steps, and the planner's expectations.

    registry: a process can register each metric only once in it; tests pass their own.
    """

    def __init__(self, gamma: int, drafter: str, registry: CollectorRegistry = REGISTRY):
        super().__init__(registry)
        self.acceptance = AcceptanceCounters(gamma, drafter, registry)
        self.failures = Counter(
            "outrider_speculation_failures", "Failures of parts that serving does without.", ["part"], registry=registry
        )
        counter, histogram = self.counter, self.histogram
        self.steps = counter("outrider_decode_steps", "Decode steps of the engine.")
        self.undrafted_steps = counter("outrider_undrafted_steps", "Decode steps that ran without drafting.")
        self.request_steps = counter("outrider_request_steps", "Decode steps summed over the requests in each.")
        self.drafted = counter("outrider_drafted_tokens", "Tokens proposed by the drafter.")
        self.budget = counter(
            "outrider_budget_tokens", "Drafted tokens that the planner allowed, where it set a bound."
        )
        self.verified = counter("outrider_verified_tokens", "Drafted tokens that the target verified.")
        self.accepted = counter("outrider_accepted_tokens", "Drafted tokens that were accepted.")
        self.wasted = counter("outrider_wasted_tokens", "Drafted tokens that were verified and not accepted.")
        self.accepted_length = histogram(
            "outrider_accepted_length",
            "Tokens per request and step that belong to the answer, the target's own included.",
            buckets=[float(n) for n in range(1, gamma + 2)],
        )
        self.step_seconds = histogram(
            "outrider_step_seconds", "Time from one decode step to the next.", buckets=TOKEN_SECONDS
        )
        self.predicted_seconds = counter(
            "outrider_predicted_step_seconds", "Predicted time of the steps in outrider_predictable_step_seconds."
        )
        self.predictable_seconds = counter(
            "outrider_predictable_step_seconds", "Time of the decode steps whose time was predicted."
        )
        self.prediction_error_seconds = counter(
            "outrider_step_prediction_error_seconds", "Absolute differences between predicted and taken time."
        )
        self.draft_seconds = counter("outrider_draft_seconds", "Time spent drafting; 0 on a GPU.")
        self.planner_seconds = histogram(
            "outrider_planner_seconds", "Time of the planner per decode step.", buckets=PLANNER_BUCKETS
        )

        self.prefill_tokens = histogram(
            "outrider_prefill_chunk_tokens",
            "Prompt tokens read per forward.",
            buckets=[float(1 << n) for n in range(4, 15)],
        )
        self.prefill_seconds = histogram(
            "outrider_prefill_seconds", "Time of the forwards that read prompts.", buckets=TOKEN_SECONDS
        )
        self.stream_pauses = histogram(
            "outrider_stream_pause_seconds",
            "Time from one decode step's end to the next one's, prefills between them included.",
            buckets=TOKEN_SECONDS,
        )

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Count a forward that read `tokens` of prompts."""
        self.prefill_tokens.observe(tokens)
        self.prefill_seconds.observe(seconds)

    def observe_pause(self, seconds: float) -> None:
        """Count a pause between decode steps."""
        self.stream_pauses.observe(seconds)

    def observe_step(
        self,
        step: Step,
        confidence: np.ndarray,
        classes: np.ndarray,
        draft_lens: np.ndarray,
        verify_lens: np.ndarray,
        accept_lens: np.ndarray,
        tokens: np.ndarray,
    ) -> None:
        """Count a step. confidence: [R, gamma], calibrated. Other arrays: [R]. classes: places in
        `calibration.classes.CLASSES`. accept_lens: accepted drafts plus one. tokens: committed, fewer than accept_lens
        if an answer ends."""
        requests, verified = len(classes), sum(verify_lens.tolist())  # Python's sums are faster for a few numbers
        accepted = sum(accept_lens.tolist()) - requests
        self.steps.inc()
        self.request_steps.inc(requests)
        self.drafted.inc(sum(draft_lens.tolist()))
        self.verified.inc(verified)
        self.accepted.inc(accepted)
        self.wasted.inc(verified - accepted)
        if not step.drafts:
            self.undrafted_steps.inc()
        if step.budget.tokens is not None:
            self.budget.inc(step.budget.tokens)
        for count in tokens.tolist():
            self.accepted_length.observe(count)
        if verified:
            self.acceptance.observe(confidence, classes, verify_lens, accept_lens)
        self.flush_if_due()

    def flush(self) -> None:
        self.acceptance.flush()
        super().flush()

    def observe_draft_and_planner(self, draft_seconds: float, planner_seconds: float) -> None:
        """Count the time that a decode step spent drafting and planning."""
        self.draft_seconds.inc(draft_seconds)
        self.planner_seconds.observe(planner_seconds)

    def observe_time(self, seconds: float, predicted: float | None) -> None:
        """Count a decode step's time and the time that the cost model predicted; None without a cost model."""
        self.step_seconds.observe(seconds)
        if predicted is not None:
            self.predicted_seconds.inc(predicted)
            self.predictable_seconds.inc(seconds)
            self.prediction_error_seconds.inc(abs(predicted - seconds))
