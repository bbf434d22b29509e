"""Thoroughness of a measurement, and the step shapes that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

MARGIN_STEPS = 3
"""Steps of each request before and after the timed ones: while requests join, and until the last one has started."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """requests: R. tokens: verified in a step, anchors included, at least R. context: prompt tokens per request."""

    requests: int
    tokens: int
    context: int

    def drafted(self, index: int) -> int:
        """Return the draft tokens of request `index`, counted from 0: as even as possible."""
        return self.tokens // self.requests + (index < self.tokens % self.requests) - 1

    def total_context(self, steps: int) -> float:
        """Return the cached tokens of all requests together, in the middle of `steps` steps."""
        return float(self.requests * (self.context + steps // 2))


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of an engine. requests: at a time. cache: tokens of all of them. context: tokens of one."""

    requests: int
    cache: int
    context: int

    def prompts(self, lengths: Sequence[int], behind: int) -> list[int]:
        """Return the `lengths`, ascending, that leave room in a context for `behind` tokens.

        The longest prompt that fits replaces longer ones if it is at least twice the next shorter one: a slope between
        nearer lengths would be noise.
        """
        longest = self.context - behind
        fitting = [length for length in lengths if length <= longest]
        if len(fitting) < len(lengths) and longest >= max(1, 2 * max(fitting, default=0)):
            fitting.append(longest)
        return fitting

    def holds(self, requests: int, each: int) -> bool:
        """Return True if `requests` requests fit, each with `each` tokens of the cache."""
        return requests <= self.requests and requests * each <= self.cache

    def nothing_fits(self, what: str) -> RuntimeError:
        """Return the error for a measurement in which no shape fits."""
        held = f"a KV cache of {self.cache} tokens and contexts of {self.context}"
        return RuntimeError(f"{held} hold no {what} to measure")


@dataclass(frozen=True, slots=True)
class Effort:
    """Thoroughness of a measurement.

    tokens: per request, the anchor included; None: every number that a model can draft.
    steps: timed per shape and round.
    prompts, new_tokens: of the answers that the calibration is fitted on, greedy and sampled.
    prefill_seconds: of reading prompts, about. seconds: stop measuring shapes after this time; None: no limit.
    answer_seconds: the same for answers. final: no more is measured in idle time.
    """

    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    tokens: tuple[int, ...] | None = None
    contexts: tuple[int, ...] = (128, 1024)
    steps: int = 10
    rounds: int = 3
    prompts: int = 144
    new_tokens: int = 128
    prefill_seconds: float = 20.0
    seconds: float | None = None
    answer_seconds: float | None = None
    final: bool = True

    def shapes(self, gamma: int, longest: int, capacity: Capacity, buckets: Sequence[int] | None = None) -> list[Shape]:
        """Return shapes that fit the engine, in the order of the fields; raises RuntimeError if none does.

        gamma: draft tokens of a model. longest: of a draft, by model or lookup.
        buckets: step sizes on a GPU; without `tokens` each of them is measured. None: any size.
        """
        each = self.tokens or tuple(sorted({*range(1, gamma + 2), longest + 1}))
        behind = (longest + 1) * 2 + self.steps + MARGIN_STEPS
        shapes = [
            Shape(requests, count, context)
            for context in capacity.prompts(self.contexts, behind)
            for requests in self.requests
            if capacity.holds(requests, context + behind)
            for count in self._sizes(requests, [tokens for tokens in each if tokens <= longest + 1], longest, buckets)
        ]
        if not shapes:
            raise capacity.nothing_fits("step")
        return shapes

    def _sizes(self, requests: int, each: list[int], longest: int, buckets: Sequence[int] | None) -> list[int]:
        """Return the tokens of steps of `requests` requests, each with up to longest + 1."""
        if buckets is None:
            return [requests * count for count in each]
        able = [bucket for bucket in buckets if requests <= bucket <= requests * (longest + 1)]
        if self.tokens is None:
            return able
        wanted = (min((bucket for bucket in able if bucket >= requests * count), default=None) for count in each)
        return sorted({bucket for bucket in wanted if bucket is not None})


THOROUGH = Effort()
QUICK = Effort(
    requests=(1, 8, 32, 2, 16, 4),
    tokens=(1, 3, 8),
    contexts=(128,),
    steps=6,
    rounds=3,
    prompts=16,
    new_tokens=48,
    prefill_seconds=2.0,
    seconds=20.0,
    final=False,
)
"""Effort of a server that starts without a profile: well under a minute on two cores with the embedded model.

One context and few numbers of tokens, but every number of requests, because predictions between measured numbers of
requests are the least reliable. The ends and the middle come first, for machines that run out of time.
"""
QUICK_ON_GPU = replace(QUICK, requests=(1, 32, 128, 8, 64, 2, 16, 4), steps=12, rounds=2)
"""The same for a GPU: its steps take milliseconds and hold more requests, and every other one runs without a draft."""
IDLE = Effort(
    requests=(1, 8, 2, 4, 16, 32),
    tokens=(1, 2, 4, 8),
    rounds=2,
    prompts=48,
    new_tokens=96,
    prefill_seconds=6.0,
    seconds=90.0,
    answer_seconds=45.0,
)
"""Effort of an idle server: two contexts and more answers than `QUICK`, in little more than two minutes of work.
`outrider tune` measures the rest on demand."""
