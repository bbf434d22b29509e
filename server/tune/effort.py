"""How thoroughly to measure, and which step shapes that comes to."""

from __future__ import annotations

from dataclasses import dataclass

MARGIN_STEPS = 3
"""Steps of each request beyond those that are timed: while requests join, and until the last one has begun."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """requests: R. tokens: verified per request and step, the anchor included. context: prompt tokens per request."""

    requests: int
    tokens: int
    context: int

    def total_context(self, steps: int) -> float:
        """Cached tokens of all requests together, in the middle of `steps` steps."""
        return float(self.requests * (self.context + steps // 2))


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure.

    steps: timed per shape and round. prompts, new_tokens: of the answers that the calibration is fitted on, greedy
    and sampled. seconds: stop measuring shapes after that long; None for no limit.
    """

    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    tokens: tuple[int, ...] | None = None
    contexts: tuple[int, ...] = (128, 1024)
    steps: int = 10
    rounds: int = 3
    prompts: int = 144
    new_tokens: int = 128
    seconds: float | None = None

    def shapes(self, gamma: int, longest: int, max_requests: int, max_total_tokens: int) -> list[Shape]:
        """What fits the engine, in the order of the fields; raises RuntimeError where nothing does.

        gamma: draft tokens of a model. longest: of a draft, whoever made it.
        """
        tokens = self.tokens or tuple(sorted({*range(1, gamma + 2), longest + 1}))
        room = (longest + 1) * 2 + self.steps + MARGIN_STEPS
        found = [
            Shape(requests, count, context)
            for context in self.contexts
            for requests in self.requests
            for count in tokens
            if count <= longest + 1 and requests <= max_requests and requests * (context + room) <= max_total_tokens
        ]
        if not found:
            raise RuntimeError(f"a KV cache of {max_total_tokens} tokens holds no step to measure")
        return found


THOROUGH = Effort()
QUICK = Effort(
    requests=(1, 8, 32, 2, 16, 4),
    tokens=(1, 3, 8),
    contexts=(128,),
    steps=6,
    rounds=3,
    prompts=16,
    new_tokens=48,
    seconds=20.0,
)
"""For a server that starts without a profile: well under a minute on two cores with the embedded model.

One context and few tokens, but every number of requests, the ends and the middle first for machines on which the time
does not suffice: between measured numbers of requests more was lost than by fewer tokens (`scheduler/MEASURED.md`)."""
