"""Records of the worker as arrays for fitting calibrations."""

from types import SimpleNamespace

import pytest

from outrider.scheduler.calibration.fit import fit_table
from outrider.server.tune.measure import NO_RECORDS, to_records
from outrider.server.tune.report import Tuned


def test_only_the_models_gamma_tokens_of_longer_drafts_are_fitted() -> None:
    lists = {
        "confidence": [[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2]],
        "verify_lens": [4, 1],
        "accepted": [3, 0],
        "classes": [1, 0],
    }
    records = to_records(lists, 2)
    assert records.confidence.tolist() == [pytest.approx([0.9, 0.8]), pytest.approx([0.5, 0.4])]
    assert records.verify_lens.tolist() == [2, 1]
    assert records.accepted.tolist() == [2, 0]
    assert to_records(NO_RECORDS, 2).confidence.shape == (0, 2)


def test_a_measurement_without_any_drafts_is_summed_up() -> None:
    nothing = to_records(NO_RECORDS, 2)
    profile = SimpleNamespace(points=(1, 2, 3))
    summary = Tuned(profile, fit_table(nothing, nothing, dataset="none"), nothing).summary
    assert summary.startswith("3 step times; no drafts")
