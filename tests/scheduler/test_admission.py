"""Admission: bounds, buckets, the baselines, and no look ahead."""

import numpy as np
import pytest
import torch
from finished import seasoned
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import check_nothing_is_read_behind_a_token, every_planner, view

from outrider.kernels.drafts import survival_of, survival_torch
from outrider.scheduler.admission import largest
from outrider.scheduler.baselines import Threshold, VerifyAll
from outrider.scheduler.buckets import TokenBuckets
from outrider.scheduler.contract import Budget

pytestmark = pytest.mark.usefixtures("compiled")
GAMMA, REQUESTS = 3, 5
# few values, so that ties are common
CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 0.5000001, 0.9, 1.0, float("nan"), -0.5, 1.5])
BLOCKS = st.lists(st.lists(CONFIDENCES, min_size=GAMMA, max_size=GAMMA), min_size=1, max_size=REQUESTS)
EACH_BUCKETS = pytest.mark.parametrize("buckets", [None, TokenBuckets(REQUESTS, GAMMA + 1)], ids=["any size", "tiers"])


def test_survival_of_broken_confidences():
    confidence = torch.tensor([[0.5, torch.nan, 1.0], [2.0, 0.5, -1.0], [torch.inf, 0.5, 0.5]])
    expected = torch.tensor([[0.5, 0.0, 0.0], [1.0, 0.5, 0.0], [1.0, 0.5, 0.25]])
    for survival in (survival_of, survival_torch):
        assert torch.equal(survival(confidence), expected)
        lens = torch.tensor([3, 1, 0])
        assert torch.equal(survival(confidence, lens)[1:], torch.tensor([[1.0, 0, 0], [0, 0, 0]]))
    assert bool(confidence[0, 1].isnan())


def test_bounds_and_urgent_requests_reach_the_kernel():
    """`tests/kernels/test_drafts.py` compares the kernel with a sort."""
    confidence, lens = torch.tensor([[0.5, 0.9], [0.9, 0.9]]), torch.tensor([2, 2])
    assert largest(confidence, lens, None).tolist() == [2, 2]
    assert largest(confidence, lens, 3).tolist() == [1, 2]
    assert largest(confidence, lens, None, bounds=np.array([0.4, 0.46])).tolist() == [1, 2]
    assert largest(confidence, lens, None, bounds=np.array([[0.6], [0.6]])).tolist() == [0, 2]
    assert largest(confidence, lens, 3, first=np.array([True, False])).tolist() == [2, 1]


@settings(deadline=None)
@EACH_BUCKETS
@given(block=BLOCKS, data=st.data())
def test_admission_does_not_look_at_later_tokens(block, data, buckets):
    made = [seasoned(planner, len(block), GAMMA) for planner in every_planner(len(block), GAMMA, buckets)]
    check_nothing_is_read_behind_a_token(made, block, CONFIDENCES, data)


@settings(deadline=None)
@EACH_BUCKETS
@given(block=BLOCKS, data=st.data())
def test_every_planner_keeps_its_bound_and_fills_a_tier(block, data, buckets):
    requests = len(block)
    limits = data.draw(st.lists(st.integers(0, GAMMA), min_size=requests, max_size=requests))
    for planner in every_planner(requests, GAMMA, buckets):
        seasoned(planner, requests, GAMMA, data.draw(st.integers(0, 12)))
        budget, room = planner.budget(view(requests, GAMMA, limits=limits)), sum(limits)
        bound = room if budget.tokens is None else min(budget.tokens, room)
        if buckets is not None:
            assert budget.tokens is not None, planner
            filled = requests + bound == buckets.round_up(requests + bound)
            assert bound in (0, room) or filled, (planner, bound, room)
        verify_lens = planner.admit(torch.tensor(block), torch.tensor(limits), budget)
        assert verify_lens.dtype == torch.int64
        assert int(verify_lens.sum()) <= bound, planner
        assert bool(((verify_lens >= 0) & (verify_lens <= torch.tensor(limits))).all()), planner


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
