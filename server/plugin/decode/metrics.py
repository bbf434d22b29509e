"""Speculation in numbers, as Prometheus counters and histograms (so that `rate()` works on them)."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from ..buckets import TOKEN_SECONDS
from .acceptance_counters import AcceptanceCounters
from .buffered import BufferedMetrics
from .optional.part import OptionalPart
from .step import StepDrafts

PLANNER_BUCKETS = (2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)


class SpeculationMetrics(BufferedMetrics, OptionalPart):
    """Counts tokens drafted, verified and accepted by decode steps, and the planner's expectations.

    registry: a process can register each metric only once in it; tests pass their own.
    """

    part = "metrics"

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
        self.drafted_tokens = counter("outrider_drafted_tokens", "Tokens proposed by the drafter.")
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

    def drafted(self, drafts: StepDrafts) -> None:
        self.count(drafts)
        self.draft_seconds.inc(drafts.admission.draft_seconds or 0.0)
        self.planner_seconds.observe(drafts.planner_seconds)

    def count(self, drafts: StepDrafts) -> None:
        budget, requests = drafts.step.budget.tokens, len(drafts.classes)
        verified = sum(drafts.verify_lens.tolist())  # Python's sums are faster for a few numbers
        accepted = sum(drafts.accept_lens.tolist()) - requests
        self.steps.inc()
        self.request_steps.inc(requests)
        self.drafted_tokens.inc(sum(drafts.draft_lens.tolist()))
        self.verified.inc(verified)
        self.accepted.inc(accepted)
        self.wasted.inc(verified - accepted)
        if not drafts.step.drafts:
            self.undrafted_steps.inc()
        if budget is not None:
            self.budget.inc(budget)
        for count in drafts.tokens.tolist():
            self.accepted_length.observe(count)
        if verified:
            self.acceptance.observe(drafts.confidence, drafts.classes, drafts.verify_lens, drafts.accept_lens)
        self.flush_if_due()

    def flush(self) -> None:
        self.acceptance.flush()
        super().flush()

    def observe_time(self, seconds: float, predicted: float | None) -> None:
        """Count a decode step's time and the time that the cost model predicted; None without a cost model."""
        self.step_seconds.observe(seconds)
        if predicted is not None:
            self.predicted_seconds.inc(predicted)
            self.predictable_seconds.inc(seconds)
            self.prediction_error_seconds.inc(abs(predicted - seconds))
