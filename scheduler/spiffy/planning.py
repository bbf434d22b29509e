"""The planner of block-diffusion models: how many draft states of each open block a forward has.

A forward over R open blocks brings R steps, and one more for each accepted draft. Drafts of all requests are put in one
order, and the first n are admitted that make most steps per second, or none. Scores, times and other requests change
which states are drafted and no text: a draft is accepted if base decoding comes to it (`fill.follow`).

Service levels come first, as in `service_levels.py`: as many are kept as any choice keeps, then steps per second count.

If drafts do not pay for themselves and for the host's time, the planner rests: a round then costs as much as without
speculation. A rest ends with a probe (`probing.py`), or when under three quarters of its requests remain. Even a probe
drafts only states that pay, since the next round shows by itself whether a state one step ahead was right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost.drift import RATE, running_mean
from ..curve import Curve
from ..planner import Plan
from ..probing import Probing, mostly_the_same
from ..service_levels import MARGIN
from .learning import RoundCost

LOOKS = 24
"""Rounds with drafts to choose from, after which the planner rests if these saved no time in the mean."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundView:
    """The state of R open blocks before anything is drafted.

    names: [R] int64, of their requests, unique for ever. context: tokens in the cache, summed over the requests.
    levels: [R] their service levels in tokens per second; 0: none. progress: [R] tokens per second so far; inf at the
    beginning.
    """

    names: np.ndarray
    context: float
    levels: np.ndarray
    progress: np.ndarray


def plan_states(
    view: RoundView,
    chances: Sequence[np.ndarray],
    sizes: Sequence[np.ndarray],
    seconds: Callable[[np.ndarray], np.ndarray],
    step_tokens: float = 1.0,
) -> tuple[np.ndarray, Plan]:
    """[R] drafts of each request, and the plan: a point of the curve of steps per second by admitted drafts.

    chances, sizes: of each request, [n] chances of its drafts in their order of admission, and the mean rows that each
    adds. seconds: from rows [n] that drafts add to a round to seconds [n] of the round. step_tokens: tokens that a step
    reveals.

    With levels two orders are compared: drafts that pay first, late requests before the rest; and all drafts of late
    requests first, then of requests with a level, since a draft may help its request and not pay for all.
    """
    requests = len(chances)
    owners = np.repeat(np.arange(requests), [len(own) for own in chances])
    chance, size = np.concatenate(chances), np.concatenate(sizes)
    # A draft is worth no more than the drafts before it, which it needs.
    worth = np.concatenate([np.minimum.accumulate(own / rows) for own, rows in zip(chances, sizes, strict=True)])

    def best(order: np.ndarray, leveled: np.ndarray) -> tuple[np.ndarray, Plan]:
        """The best plan that admits drafts in this order. leveled: requests with a level, as numbers."""
        steps = requests + np.append(0.0, chance[order].cumsum())
        taken = seconds(np.append(0.0, size[order].cumsum()))
        accepted = np.where(owners[order] == leveled[:, None], chance[order], 0.0).cumsum(1)
        tokens = step_tokens * (1.0 + np.pad(accepted, ((0, 0), (1, 0))))
        kept = (tokens >= MARGIN * view.levels[leveled, None] * taken).sum(0)
        point = int(np.where(kept == kept.max(), steps / taken, 0.0).argmax())
        counts = np.bincount(owners[order[:point]], minlength=requests)
        return counts, Plan(Curve(steps / taken, taken), point, int(kept[point]))

    by_worth = np.argsort(-worth, kind="stable")
    counts, plan = best(by_worth, np.zeros(0, dtype=np.int64))
    if not np.count_nonzero(view.levels):
        return counts, plan
    on_time, without = ~(view.progress < view.levels)[owners], (view.levels == 0)[owners]
    pays = np.zeros(len(worth), dtype=bool)
    pays[by_worth[: plan.point]] = True
    orders = np.lexsort((-worth, on_time, ~pays)), np.lexsort((-worth, without, on_time))
    return max((best(order, np.flatnonzero(view.levels)) for order in orders), key=lambda choice: choice[1].value())


@dataclass(slots=True)
class _Load:
    """Rounds of about one number of open blocks. saved: mean seconds that drafts saved in the last `rounds`, at most
    LOOKS. deciding: mean seconds of the host for making and weighing drafts."""

    saved: float = 0.0
    rounds: int = 0
    deciding: float = 0.0


class StatePlanner:
    """Decides in each round how many states are drafted for each request."""

    def __init__(self, cost: RoundCost | None = None) -> None:
        self.cost = cost or RoundCost()
        self._probing = Probing()
        self._resting: np.ndarray | None = None  # names of the requests that the rest began with
        self._without = 0.0  # seconds of a round without drafts
        self._loads: dict[int, _Load] = {}  # by the power of two that the number of open blocks has reached
        self._steps, self._tokens = 0.0, 0.0  # recent steps, and tokens that they revealed

    @property
    def rests(self) -> bool:
        """True if neither this round nor the next one drafts, so that predictions need not be kept."""
        return self._resting is not None and not self._probing.ready

    @property
    def step_tokens(self) -> float:
        """Tokens that a step reveals, in the mean."""
        return self._tokens / self._steps if self._steps else 1.0

    def looks(self, view: RoundView) -> bool:
        """True if drafts are to be made and weighed in this round. Call it once a round, before they are."""
        if self._resting is not None and not np.count_nonzero(view.levels):
            still = mostly_the_same(view.names, self._resting)
            if still and not self._probing.due(self._load(len(view.names)).deciding, self._without):
                return False
        self._resting = None
        return True

    def admit(
        self, view: RoundView, rows: int, chances: Sequence[np.ndarray], sizes: Sequence[np.ndarray]
    ) -> list[int]:
        """Number of drafts of each of R requests, the first ones in its order; only if `looks` was true.

        rows: of the round without them. chances, sizes: as of `plan_states`.
        """
        blocks = len(view.names)
        if not self.cost.known:
            return [0] * blocks

        def seconds(more: np.ndarray) -> np.ndarray:
            return self.cost.seconds(rows + more, blocks, view.context)

        counts, plan = plan_states(view, chances, sizes, seconds, self.step_tokens)
        self._without = float(plan.curve.seconds[0])
        if any(map(len, chances)) and not np.count_nonzero(view.levels):
            load = self._load(blocks)
            load.rounds = min(load.rounds + 1, LOOKS)
            saved = (plan.throughput * self._without / blocks - 1.0) * float(plan.curve.seconds[plan.point])
            load.saved += (saved - load.deciding - load.saved) / load.rounds
            if load.saved <= 0 and load.rounds == LOOKS:
                self._resting = view.names
        return counts.tolist()

    def observe_deciding(self, seconds: float, open_blocks: int) -> None:
        """Learn that the host made and weighed drafts for `seconds` in a round."""
        load = self._load(open_blocks)
        load.deciding = running_mean(load.deciding, seconds)

    def observe_steps(self, steps: int, tokens: int) -> None:
        """Learn that `steps` of open blocks revealed `tokens`."""
        self._steps = (1 - RATE) * self._steps + steps
        self._tokens = (1 - RATE) * self._tokens + tokens

    def _load(self, open_blocks: int) -> _Load:
        return self._loads.setdefault(open_blocks.bit_length(), _Load())
