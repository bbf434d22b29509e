"""Sizes of a step on a GPU."""

import numpy as np
import pytest
import torch
from admissions import by_sorting
from finished import observe
from hypothesis import given
from hypothesis import strategies as st
from planning import curve_cost, view

from outrider.kernels.drafts import survival_of
from outrider.scheduler.baselines import VerifyAll, until_first_drop
from outrider.scheduler.buckets import TokenBuckets
from outrider.scheduler.curve import curve_by_tokens
from outrider.scheduler.planner import Asynchronous

GAMMA, REQUESTS = 3, 5
BUCKETS = TokenBuckets(REQUESTS, GAMMA + 1)
CONFIDENCES = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1, width=32))
BLOCKS = st.lists(st.lists(CONFIDENCES, min_size=GAMMA, max_size=GAMMA), min_size=1, max_size=REQUESTS)


@given(st.integers(1, 300), st.integers(1, 16), st.data())
def test_a_graph_has_the_tokens_and_slots_and_little_padding(requests, width, data):
    buckets = TokenBuckets(requests, width)
    running = data.draw(st.integers(1, requests))
    tokens = data.draw(st.integers(running, running * width))
    bucket = buckets.round_up(tokens)
    assert tokens <= bucket <= buckets.sizes[-1] == requests * width
    assert bucket - tokens <= tokens / 8
    slots = buckets.slots(bucket)
    # Padding has a slot of its own, unless the batch is full with one token per request.
    assert slots > running or (slots == running == bucket)
    assert slots <= bucket <= slots * width or bucket == requests * width
    assert buckets.round_up_each(np.array([running, tokens])).tolist() == [buckets.round_up(running), bucket]
    assert list(buckets.sizes) == sorted(set(buckets.sizes))


@given(st.integers(1, 300), st.integers(1, 16), st.integers(0, 300), st.data())
def test_a_graph_has_a_slot_for_its_padding_or_none(requests, width, captured, data):
    """Also with graphs for fewer requests than may run."""
    buckets = TokenBuckets(requests, width, captured)
    assert buckets.graphs == buckets.sizes[: len(buckets.graphs)]
    assert all(size <= captured * width for size in buckets.graphs)
    running = data.draw(st.integers(1, requests))
    tokens = data.draw(st.integers(running, running * width))
    bucket = buckets.round_up(tokens)
    if buckets.has_graph(running, bucket):
        assert bucket in buckets.graphs
        assert running < buckets.slots(bucket) or (running == tokens == bucket == buckets.slots(bucket))
        assert bucket <= buckets.slots(bucket) * width  # a graph is captured with requests of at most `width` tokens
    else:
        assert running > captured or bucket not in buckets.graphs


@given(st.integers(1, 300), st.integers(1, 16), st.data())
def test_filling_a_tier_is_free_and_complete(requests, width, data):
    buckets = TokenBuckets(requests, width)
    running = data.draw(st.integers(1, requests))
    room = data.draw(st.integers(0, running * (width - 1)))
    wanted = data.draw(st.integers(0, 2 * room))
    filled = buckets.fill_bucket(running, wanted, room)
    assert min(wanted, room) <= filled <= room
    assert buckets.round_up(running + filled) == buckets.round_up(running + min(wanted, room))
    assert filled == room or running + filled == buckets.round_up(running + filled)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="1 to 20 tokens, not 21"):
        BUCKETS.round_up(21)
    with pytest.raises(ValueError, match="at least one request"):
        TokenBuckets(0, 4)


@given(BLOCKS, st.lists(st.floats(0, 0.5), max_size=REQUESTS * GAMMA))
def test_algorithm_1_token_by_token(block, steps):
    survival, seconds, tokens = survival_of(torch.tensor(block)), np.cumsum([1.0, *steps]), len(steps)
    brought, admitted = float(len(block)), 0
    for value in np.sort(survival.numpy(), axis=None)[::-1][:tokens].astype(np.float64):
        if value <= 0 or (brought + value) / seconds[admitted + 1] <= brought / seconds[admitted]:
            break
        brought, admitted = brought + value, admitted + 1
    lens = until_first_drop(survival, torch.from_numpy(seconds))
    assert lens.tolist() == by_sorting(survival, admitted).tolist()


def test_a_bound_follows_verified_tokens_and_grows_when_it_was_short():
    planner = VerifyAll()
    planner.buckets = TokenBuckets(8, 4)

    def bound_after(verified: list[int], times: int = 1, requests: int = 4) -> int | None:
        for _ in range(times):
            step, lens = view(4, 3), np.array(verified)
            planner.budget(step)
            observe(planner, step, np.zeros((4, 3)), lens, lens + 1, np.ones(4, dtype=bool))
        return planner.budget(view(requests, 3)).tokens

    assert planner.budget(view(4, 3)).tokens == 12
    assert bound_after([1, 0, 0, 0], 8) == 3  # a bound of 1 was used up
    assert bound_after([1, 1, 1, 0]) == 7
    assert bound_after([0, 0, 0, 0], 8) == 1
    assert bound_after([1, 1, 1, 0], requests=8) == 14


def test_a_point_of_the_mean_curve_has_a_fixed_time():
    survival = np.array([[[0.9, 0.0]], [[0.5, 0.3]]], dtype=np.float32)
    curve = curve_by_tokens(1, survival, np.array([1.0, 2.0, 4.0]), padded=True)
    assert curve.throughput == pytest.approx([1.0, 1.7 / 2, 1.85 / 4], abs=1e-4)
    assert curve.least(2) == 0


def test_the_asynchronous_planner_knows_the_cost_of_tiers():
    """For two requests 9 tokens cost as much as 9, 17 as much as 18."""
    planner = Asynchronous(curve_cost(2, [1.0] * 9), 4)
    planner.buckets = TokenBuckets(4, 5)
    step = view(2, 4)
    budget = planner.budget(step)
    assert budget.tokens == 8
    assert len(budget.seconds) == 9
