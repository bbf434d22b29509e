"""The number of draft states of a forward: as many, over all requests, as pay for themselves.

A forward over R open blocks brings R steps, and one more for each draft that is accepted. What is admitted raises steps
per second; none at all is one of the choices. What a plan looks at (scores, times, other requests) changes which states
are drafted, and no text: a draft is accepted where it is the state that base decoding comes to (`lookup.py`). Service
levels bound rounds as they bound steps of other models (`admission.py`).

Where drafts do not pay for themselves and for the host's time to make and weigh them, the planner rests: nothing is
filled or scored, and a round costs what it does without speculation. A rest ends when other requests have come, or now
and then for a look, which is paid from a bounded share of the time (`planners/probing.py`). A look drafts only what
pays. It is enough to learn from: what becomes of a block does not depend on what is drafted, so it tells of every
filled state that is one step ahead whether it would have been accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cost.model import StepCost
from ..planners.base import StepView
from ..planners.probing import LOOK_SHARE, Probing
from ..planners.resting import Resting
from .admission import Admitted, Levels, admitted

BINS, DEPTHS = 10, 4
PRIOR = 4.0
"""Weight of a score, taken as a chance, in drafts observed."""
WINDOW = 400.0
"""Drafts of one depth and score after which old ones have faded."""
MEMORY = 0.99
"""Weight of the past when a round is added to it."""
ENOUGH = 8.0
"""Rounds after which their cost is known."""
LOOKS = 24
"""Rounds with something to draft whose mean decides whether the planner rests; it does not before so many."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundView:
    """The state of R open blocks before anything is drafted.

    names: [R] int64, of their requests, each with a name that no other one ever has. context: tokens in the cache, in
    sum. levels: [R] tokens per second that they asked for; 0: none. progress: [R] that they have had so far; inf where
    they have just begun.
    """

    names: np.ndarray
    context: float
    levels: np.ndarray
    progress: np.ndarray

    def step_view(self) -> StepView:
        """The round as `Resting` reads it."""
        none = np.zeros(len(self.names))
        return StepView(self.names, np.zeros_like(self.names), none, none, self.levels, self.progress)


class Acceptance:
    """Acceptance rates of drafts by score and by steps ahead, learnt while serving."""

    def __init__(self) -> None:
        middles = (np.arange(BINS) + 0.5) / BINS
        chances = np.stack([middles ** (depth + 1) for depth in range(DEPTHS)])
        self._seen = np.full((DEPTHS, BINS), PRIOR)
        self._accepted = PRIOR * chances

    def chances(self, scores: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Rates in 0..1 of drafts with `scores` that are `depths` steps ahead, counted from 1; all of one shape."""
        at = _cells(scores, depths)
        chances: np.ndarray = self._accepted[at] / self._seen[at]
        return chances

    def observe(self, scores: np.ndarray, depths: np.ndarray, accepted: np.ndarray) -> None:
        """Take in outcomes of drafts; accepted: [n] bool."""
        at = _cells(scores, depths)
        np.add.at(self._seen, at, 1.0)
        np.add.at(self._accepted, at, accepted.astype(float))
        fade = np.minimum(WINDOW / self._seen, 1.0)
        self._seen *= fade
        self._accepted *= fade


def _cells(scores: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.minimum(depths, DEPTHS) - 1, np.minimum((scores * BINS).astype(np.int64), BINS - 1)


class RoundCost:
    """Seconds of a round by its rows: as measured before, corrected by rounds of late; else a line through those.

    Rounds of one size say nothing of the line's slope, and noise says what is not so. Therefore it begins with a slope
    that lets half of a round's time be for its rows, as if a round of twice the rows had been seen.

    measured: of rounds, whose tokens are those of all rows. block_size: tokens of a row.
    """

    def __init__(self, measured: StepCost | None = None, block_size: int = 1) -> None:
        self.measured, self._block = measured, block_size
        self._sums = np.zeros(5)  # weight, rows, seconds, rows², rows × seconds

    @property
    def known(self) -> bool:
        """True if costs are known."""
        return self.measured is not None or bool(self._sums[0] > ENOUGH)

    def observe(self, rows: int, seconds: float, open_blocks: int = 1, context: float = 0.0) -> None:
        """A round took so long. context: tokens in the cache, summed over the requests."""
        if self.measured is not None:
            self.measured.observe(open_blocks, rows * self._block, context, 0, seconds)
        self._sums = MEMORY * self._sums + np.array([1.0, rows, seconds, rows * rows, rows * seconds])

    def seconds(self, rows: np.ndarray, open_blocks: int = 1, context: float = 0.0) -> np.ndarray:
        """[n] seconds of rounds of `rows` [n], which may be means; they never fall with more rows, and are above 0."""
        if self.measured is not None:
            tokens = np.rint(rows * self._block).astype(np.int64)
            return np.maximum.accumulate(self.measured.seconds(open_blocks, tokens, context))
        weight, x, y, xx, xy = self._sums
        middle, mean = x / weight, y / weight
        slope = max((xy - x * mean + middle * mean / 2) / (xx - x * middle + middle**2), 0.0)
        line: np.ndarray = np.maximum(mean + slope * (rows - middle), 1e-9)
        return line


@dataclass(slots=True)
class _Load:
    """The value of drafts while about so many blocks are open.

    gain: mean seconds that they saved of late, per round with some to choose from. rounds: it is of, up to LOOKS.
    deciding: mean seconds in which the host makes and weighs them, in a round that does.
    """

    gain: float = 0.0
    rounds: int = 0
    deciding: float = 0.0

    def observe_gain(self, seconds: float) -> None:
        self.rounds = min(self.rounds + 1, LOOKS)
        self.gain += (seconds - self.gain) / self.rounds

    def observe_deciding(self, seconds: float) -> None:
        if not self.deciding:
            self.deciding = seconds
        self.deciding += (min(seconds, 2 * self.deciding) - self.deciding) / LOOKS


class StatePlanner:
    """Decides in each round what is drafted for whom, by the chances of the drafts and what rounds take."""

    def __init__(self, cost: RoundCost | None = None) -> None:
        self.cost = cost or RoundCost()
        self._resting = Resting()
        self._looking = Probing(LOOK_SHARE)
        self._round = 0.0  # seconds of one without drafts
        self._loads: dict[int, _Load] = {}  # by the power of two that the number of open blocks has reached
        self._steps, self._tokens = 0.0, 0.0  # of late, that steps revealed

    @property
    def rests(self) -> bool:
        """Nothing was drafted in this round, nor will be in the next one: what this one said need not be kept."""
        return self._resting.on and not self._looking.ready

    @property
    def step_tokens(self) -> float:
        """Tokens that a step reveals, in the mean."""
        return self._tokens / self._steps if self._steps else 1.0

    def looks(self, view: RoundView) -> bool:
        """Once a round, before anything is made: whether drafts are to be made and weighed in it at all."""
        step = view.step_view()
        if self._resting.on and self._resting.holds(step):
            deciding = self._load(len(view.names)).deciding
            if not self._looking.due(deciding, self._round, False):
                self._resting.extend(step)
                return False
        self._resting.end()
        return True

    def admit(
        self, view: RoundView, rows: int, chances: Sequence[np.ndarray], sizes: Sequence[np.ndarray]
    ) -> list[int]:
        """Number of drafts of each of R requests, the first ones in its order; only if `looks` was true.

        rows: of the round without them. chances, sizes: of each request, [n] chances of its drafts in their order of
        admission, and the mean of the rows that they cost.
        """
        blocks = len(view.names)
        if not self.cost.known:
            return [0] * blocks
        levels = None
        if np.count_nonzero(view.levels):
            levels = Levels(view.levels, view.progress < view.levels, self.step_tokens)
        found = admitted(chances, sizes, lambda more: self.cost.seconds(rows + more, blocks, view.context), levels)
        self._round = found.without
        if any(map(len, chances)) and levels is None:
            self._weigh(found, view)
        return found.counts.tolist()

    def observe_deciding(self, seconds: float, open_blocks: int) -> None:
        """The host has made and weighed drafts for so long in a round."""
        self._load(open_blocks).observe_deciding(seconds)

    def observe_steps(self, steps: int, tokens: int) -> None:
        """Learn that so many steps of open blocks revealed so many tokens."""
        self._steps = MEMORY * self._steps + steps
        self._tokens = MEMORY * self._tokens + tokens

    def _weigh(self, found: Admitted, view: RoundView) -> None:
        """The saving of a round with drafts relative to rounds without, and whether to rest."""
        load = self._load(len(view.names))
        load.observe_gain(found.steps / len(view.names) * found.without - found.seconds - load.deciding)
        if load.gain > 0:
            self._looking.reset_backoff()
        elif load.rounds == LOOKS:
            self._resting.begin(view.step_view())

    def _load(self, open_blocks: int) -> _Load:
        return self._loads.setdefault(open_blocks.bit_length(), _Load())
