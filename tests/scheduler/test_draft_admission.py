"""Admission of a round's drafts: service levels first, then the drafts that pay."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.scheduler.service_levels import MARGIN
from outrider.scheduler.spiffy.planning import RoundView, plan_states

CHANCES = st.lists(st.floats(0, 1), max_size=4)


def line(fixed: float, per_row: float, rows: int):
    return lambda more: fixed + per_row * (rows + more)


class Found(NamedTuple):
    """Drafts of each request, expected steps and seconds of the round."""

    counts: np.ndarray
    steps: float
    seconds: float


def choose(chances: list[list[float]], seconds, asked=None, late=None, step_tokens: float = 1.0) -> Found:
    levels = np.array(asked if asked is not None else [0.0] * len(chances))
    progress = np.where(np.array(late or [False] * len(chances)), 0.0, np.inf)
    drafts = [np.array(own, dtype=float) for own in chances]
    view = RoundView(np.arange(len(chances)), 0.0, levels, progress)
    counts, plan = plan_states(view, drafts, [np.ones(len(own)) for own in drafts], seconds, step_tokens)
    taken = float(plan.curve.seconds[plan.point])
    return Found(counts, plan.throughput * taken, taken)


def kept(found: Found, chances: list[list[float]], asked: list[float], step_tokens: float = 1.0) -> int:
    return sum(
        level > 0 and step_tokens * (1 + sum(own[:count])) / found.seconds >= MARGIN * level * (1 - 1e-9)
        for own, count, level in zip(chances, found.counts, asked, strict=True)
    )


@settings(deadline=None)
@given(
    st.lists(st.tuples(CHANCES, st.sampled_from([0.0, 1.0, 20.0, 30.0, 45.0, 60.0, 500.0]), st.booleans()), min_size=1),
    st.floats(0.001, 0.05),
    st.floats(0, 0.02),
)
def test_no_other_number_of_drafts_keeps_more_levels(drafts, fixed, per_row):
    chances, asked = [own for own, _, _ in drafts], [level for _, level, _ in drafts]
    late = [level > 0 and behind for _, level, behind in drafts]
    seconds = line(fixed, per_row, len(chances))
    choice, free = choose(chances, seconds, asked, late), choose(chances, seconds)
    for other in (free, choose([[] for _ in chances], seconds)):
        assert kept(choice, chances, asked) >= kept(other, chances, asked)
    if kept(choice, chances, asked) == kept(free, chances, asked):
        assert choice.steps / choice.seconds >= free.steps / free.seconds * (1 - 1e-9)
    accepted = sum(sum(own[:count]) for own, count in zip(chances, choice.counts, strict=True))
    assert choice.steps == pytest.approx(len(chances) + accepted)
    assert choice.seconds == pytest.approx(float(seconds(np.array([choice.counts.sum()]))[0]))


def test_a_level_that_can_be_kept_bounds_the_round():
    """One request has no drafts; each draft of the other slows its steps."""
    chances, seconds = [[], [0.9, 0.9, 0.9]], line(0.02, 0.004, 2)
    assert choose(chances, seconds).counts.tolist() == [0, 3]
    for most in (0, 1, 2):
        level = 1 / (seconds(most) * MARGIN) * 0.999
        assert choose(chances, seconds, [level, 0.0]).counts.tolist() == [0, most]
    assert choose(chances, seconds, [2 * level, 0.0], step_tokens=2.0).counts.tolist() == [0, 2]


def test_a_draft_that_pays_for_its_request_alone_keeps_its_level():
    chances, seconds = [[0.5], [], [], []], line(0.02, 0.005, 4)
    assert choose(chances, seconds).counts.tolist() == [0, 0, 0, 0]
    level = 1.45 / (seconds(1) * MARGIN)
    assert choose(chances, seconds, [level, 0, 0, 0]).counts.tolist() == [1, 0, 0, 0]


def test_requests_below_their_level_are_served_first():
    """A third request's level leaves room for one draft."""
    chances, seconds = [[0.9], [0.8], []], line(0.02, 0.004, 3)
    level = 1 / (seconds(1) * MARGIN) * 0.999
    assert choose(chances, seconds, [level] * 3).counts.tolist() == [1, 0, 0]
    assert choose(chances, seconds, [level] * 3, [False, True, False]).counts.tolist() == [0, 1, 0]
