"""The live state of speculation, for the page, in types that can be sent to another process."""

from typing import Any

import numpy as np

from outrider.scheduler.calibration.classes import SAMPLING, SOURCES
from outrider.scheduler.contract import PlannedCurve

from .buffered import BufferedCounter, BufferedHistogram
from .metrics import SpeculationMetrics

CURVE_POINTS = 96
"""Most points sent of a curve, which may have thousands."""


def snapshot(metrics: SpeculationMetrics, curve: PlannedCurve | None) -> dict[str, Any]:
    """Return counts since the start, up to the last flush, and the curve of the last planned step.

    tokens: committed by decode steps. chunks: forwards that read prompts. sources: for each source, drafts with at
    least one verified token, and tokens accepted. calibration: for each source and bin of confidence, drafted tokens
    observed, accepted, and expected.
    """
    positions, bins = _by_source(metrics.acceptance.by_position.totals), _by_source(metrics.acceptance.by_bin.totals)
    totals: dict[str, BufferedCounter | BufferedHistogram] = {
        "steps": metrics.steps, "request_steps": metrics.request_steps, "tokens": metrics.accepted_length,
        "step_seconds": metrics.step_seconds, "predicted_seconds": metrics.predicted_seconds,
        "predictable_seconds": metrics.predictable_seconds, "error_seconds": metrics.prediction_error_seconds,
        "chunk_seconds": metrics.prefill_seconds, "drafted": metrics.drafted_tokens, "budget": metrics.budget,
        "verified": metrics.verified, "accepted": metrics.accepted, "wasted": metrics.wasted,
    }  # fmt: skip
    return {name: metric.total for name, metric in totals.items()} | {
        "timed_steps": metrics.step_seconds.total_count,
        "chunks": metrics.prefill_seconds.total_count,
        "sources": {
            source: {"drafts": sum(seen[:1]), "accepted": sum(accepted)}
            for source, (seen, accepted, _) in zip(SOURCES, positions.tolist(), strict=True)
        },
        "calibration": {
            source: dict(zip(("observed", "accepted", "expected"), counts, strict=True))
            for source, counts in zip(SOURCES, bins.tolist(), strict=True)
        },
        "curve": None if curve is None else _curve(curve),
    }


def _by_source(totals: np.ndarray) -> np.ndarray:
    """Return [sources, counters, n] sums of a table [counters, sampling * sources * n]."""
    values = totals.shape[1] // (len(SAMPLING) * len(SOURCES))
    return totals.reshape(len(totals), len(SAMPLING), len(SOURCES), values).sum(1).transpose(1, 0, 2)


def _curve(curve: PlannedCurve) -> dict[str, Any]:
    last = len(curve.tokens) - 1
    points = np.unique(np.linspace(0, last, min(last + 1, CURVE_POINTS)).astype(int))
    return {
        "requests": curve.requests,
        "tokens": curve.tokens[points].tolist(),
        "throughput": curve.throughput[points].tolist(),
        "chosen": list(curve.chosen),
    }
