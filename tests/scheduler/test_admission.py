"""Top-K by survival: prefixes, best value, ties, and no look ahead."""

import numpy as np
import pytest
import torch
from finished import seasoned
from hypothesis import given
from hypothesis import strategies as st
from planning import check_nothing_is_read_behind_a_token, every_planner, prefixes, value, view

from outrider.kernels.cpu import native
from outrider.kernels.drafts import survival_of, survival_torch
from outrider.scheduler.admission import largest
from outrider.scheduler.baselines import Threshold, VerifyAll
from outrider.scheduler.contract import Budget

GAMMA = 3
# few values, so that ties are common
CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 0.5000001, 0.9, 1.0, float("nan"), -0.5, 1.5])
BLOCKS = st.integers(1, 4).flatmap(
    lambda requests: st.lists(
        st.lists(CONFIDENCES, min_size=GAMMA, max_size=GAMMA), min_size=requests, max_size=requests
    )
)


def whole(block: list[list[float]]) -> torch.Tensor:
    return torch.full((len(block),), GAMMA)


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def kernels(request, monkeypatch):
    """Compiled kernels, and the plain versions."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("no compiled kernels here")


@given(BLOCKS, st.integers(0, 13), st.data())
def test_prefixes_within_bounds_and_of_the_best_value(block, tokens, data):
    confidence = torch.tensor(block)
    lens = data.draw(st.lists(st.integers(0, GAMMA), min_size=len(block), max_size=len(block)))
    survival = survival_of(confidence, torch.tensor(lens))
    verify_lens = largest(confidence, torch.tensor(lens), tokens)
    assert verify_lens.dtype == torch.int64
    assert bool((verify_lens <= torch.tensor(lens)).all())
    assert int(verify_lens.sum()) <= tokens
    possible = min(tokens, int((survival > 0).sum()))
    assert int(verify_lens.sum()) == possible
    best = max(value(survival.numpy(), counts) for counts in prefixes(lens, possible))
    assert value(survival.numpy(), tuple(verify_lens.tolist())) == pytest.approx(best, abs=1e-6)


@given(BLOCKS, st.integers(0, 13))
def test_ties_go_to_the_smaller_request_then_position(block, tokens):
    survival = survival_of(torch.tensor(block))
    order = sorted(
        (-float(survival[r, k]), r, k) for r in range(len(block)) for k in range(GAMMA) if survival[r, k] > 0
    )
    expected = [sum(1 for _, row, _ in order[:tokens] if row == r) for r in range(len(block))]
    assert largest(torch.tensor(block), whole(block), tokens).tolist() == expected


@given(BLOCKS, st.integers(0, 13), st.data())
def test_urgent_requests_come_first(block, tokens, data):
    confidence = torch.tensor(block)
    first = np.array(data.draw(st.lists(st.booleans(), min_size=len(block), max_size=len(block))))
    verify_lens = largest(confidence, whole(block), tokens, first=first)
    useful = (survival_of(confidence) > 0).sum(1)
    ahead = largest(confidence[first], whole(block)[first], tokens)
    assert torch.equal(verify_lens[first], ahead)
    rest = largest(confidence[~first], whole(block)[~first], tokens - int(ahead.sum()))
    assert torch.equal(verify_lens[~first], rest)
    if int(verify_lens[~first].sum()):
        assert torch.equal(verify_lens[first], useful[first])


@given(BLOCKS, st.data())
def test_the_version_for_devices_is_the_same(block, data):
    confidence = torch.tensor(block)
    lens = torch.tensor(data.draw(st.lists(st.integers(0, GAMMA), min_size=len(block), max_size=len(block))))
    assert torch.equal(survival_of(confidence, lens), survival_torch(confidence, lens))


def test_survival_of_broken_confidences():
    confidence = torch.tensor([[0.5, torch.nan, 1.0], [2.0, 0.5, -1.0], [torch.inf, 0.5, 0.5]])
    expected = torch.tensor([[0.5, 0.0, 0.0], [1.0, 0.5, 0.0], [1.0, 0.5, 0.25]])
    assert torch.equal(survival_of(confidence), expected)
    assert torch.equal(survival_of(confidence, torch.tensor([3, 1, 0]))[1:], torch.tensor([[1.0, 0, 0], [0, 0, 0]]))
    assert bool(confidence[0, 1].isnan())


@given(BLOCKS, st.data())
def test_admission_does_not_look_at_later_tokens(block, data):
    made = [seasoned(planner, len(block), GAMMA) for planner in every_planner(len(block), GAMMA)]
    check_nothing_is_read_behind_a_token(made, block, CONFIDENCES, data)


@given(BLOCKS, st.data())
def test_every_planner_admits_within_the_draft(block, data):
    requests = len(block)
    lens = torch.tensor(data.draw(st.lists(st.integers(0, GAMMA), min_size=requests, max_size=requests)))
    for planner in every_planner(requests, GAMMA):
        verify_lens = planner.admit(torch.tensor(block), lens, planner.budget(view(requests, GAMMA)))
        assert verify_lens.dtype == torch.int64
        assert bool(((verify_lens >= 0) & (verify_lens <= lens)).all()), planner


def test_the_property_test_detects_a_search_that_looks_ahead():
    """Power of the test above: the best point of the whole curve changes with c_{k+1}."""
    seconds = np.array([1.0, 2.0, 1 / 0.45])

    def naive(confidence: list[float]) -> int:
        survival = np.cumprod(confidence)
        return int(((1 + np.concatenate([[0], survival.cumsum()])) / seconds).argmax())

    assert naive([0.8, 0.9]) == 2
    assert naive([0.8, 0.0]) == 0


def test_baselines():
    confidence, lens = torch.tensor([[0.9, 0.9, 0.1], [0.4, 1.0, 1.0]]), torch.tensor([3, 2])
    everything = Budget(draft=True, tokens=None)
    assert VerifyAll().admit(confidence, lens, everything).tolist() == [3, 2]
    assert VerifyAll(1).admit(confidence, lens, everything).tolist() == [1, 1]
    assert Threshold(0.5).admit(confidence, lens, everything).tolist() == [2, 0]
    assert Threshold(0.0).admit(confidence, lens, everything).tolist() == [3, 2]
    assert not VerifyAll(0).budget(view(2, 3)).draft
    assert not VerifyAll().budget(view(2, 3, limits=[0, 0])).draft
    with pytest.raises(ValueError, match=r"in 0\.\.1"):
        Threshold(1.5)
    with pytest.raises(ValueError, match="0 or more"):
        VerifyAll(-1)
