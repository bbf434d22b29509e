"""A step-cost model from a few numbers, for simulations of machines that were not measured."""

from dataclasses import dataclass

from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticCost:
    """T = base + request R + context C + token max(0, B - knee), in milliseconds; drafting: draft + draft_request R.

    Until `knee` tokens a step is bound by reading the weights, and further tokens are free; beyond it by computing.
    """

    base: float = 20.0
    token: float = 0.1
    knee: float = 64.0
    request: float = 0.02
    context: float = 0.0
    draft: float = 2.0
    draft_request: float = 0.01

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is 0 or more, not {getattr(self, name)}")
        if self.base + self.request == 0:
            raise ValueError("base or request must be above 0: a step takes time")

    def seconds(self, requests: int, tokens: float, context: float) -> float:
        """Seconds of a step without drafting."""
        beyond = max(0.0, tokens - self.knee)
        return 1e-3 * (self.base + self.request * requests + self.context * context + self.token * beyond)

    def model(self, gamma: int, max_requests: int) -> StepCost:
        """A model as if measured for 1, 2, 4, … requests and 1..gamma+1 tokens of each, at two contexts."""
        sizes = [1 << i for i in range(max(max_requests - 1, 1).bit_length() + 1)]
        points = [
            Point(r, r * n, r * c, (self.seconds(r, r * n, r * c),))
            for r in sizes
            for n in range(1, gamma + 2)
            for c in (0, 4096)
        ]
        draft = [(r, 1e-3 * (self.draft + self.draft_request * r)) for r in sizes]
        return StepCost([*points, *(Point(r, 0, 0, (seconds,)) for r, seconds in draft if seconds > 0)])
