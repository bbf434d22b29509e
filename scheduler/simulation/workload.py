"""The load of a simulated server: requests that arrive, and acceptance of a drafter's tokens for them.

Acceptance is a chain of conditional probabilities c_{r,k}, as in DSpark (section 3.2.1). Requests differ in difficulty,
drift while they are answered, and each token has luck of its own, part of which the drafter's confidence does not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

ARRIVALS = ("closed", "poisson", "bursty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, their lengths and when they come.

    arrivals: "closed": `concurrency` users, each asking again once answered. "poisson": `rate` requests per second.
        "bursty": the same rate in the mean, but `burst` times as many for a fifth of the time, in bursts of
        `burst_seconds` in the mean (a Markov-modulated Poisson process).
    max_running: decoded at the same time; others wait. prompt, output: mean tokens; spread: of their logarithms.
    prefill_seconds: per prompt token; decoding stands still meanwhile, and prefill brings the first token.
    level: tokens per second that a share of `level_share` of the requests asks for; 0: none do.
    """

    arrivals: str = "closed"
    concurrency: int = 8
    rate: float = 0.0
    burst: float = 4.0
    burst_seconds: float = 10.0
    max_running: int = 10_000
    prompt: float = 256.0
    output: float = 256.0
    spread: float = 0.5
    prefill_seconds: float = 0.0
    level: float = 0.0
    level_share: float = 0.0

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"arrivals are one of {', '.join(ARRIVALS)}, not {self.arrivals!r}")
        if self.arrivals != "closed" and self.rate <= 0:
            raise ValueError(f"{self.arrivals} arrivals need a rate above 0, not {self.rate}")
        if min(self.concurrency, self.max_running) < 1 or min(self.prompt, self.output) < 1:
            raise ValueError("concurrency, max_running, prompt and output are at least 1")
        if not 1 <= self.burst < 5 or self.burst_seconds <= 0:
            raise ValueError(f"burst is from 1 to below 5 (a fifth of the time cannot hold more), not {self.burst}")
        if min(self.spread, self.prefill_seconds, self.level) < 0 or not 0 <= self.level_share <= 1:
            raise ValueError("spread, prefill_seconds and level are 0 or more, level_share lies in 0..1")

    def arrival_times(self, rng: np.random.Generator) -> Iterator[float]:
        """Endless and rising; for closed arrivals only the users' first requests, at 0."""
        if self.arrivals == "closed":
            yield from [0.0] * self.concurrency
            return
        calm = self.rate if self.arrivals == "poisson" else self.rate * (1 - 0.2 * self.burst) / 0.8
        now, bursting, ends = 0.0, False, math.inf
        if self.arrivals == "bursty":
            bursting = rng.random() < 0.2
            ends = rng.exponential(self.burst_seconds * (1 if bursting else 4))
        while True:
            rate = self.rate * self.burst if bursting else calm
            now += rng.exponential(1 / rate) if rate > 0 else math.inf
            if now <= ends:
                yield now
            else:  # memoryless: draw anew from where the state changes
                now, bursting = ends, not bursting
                ends += rng.exponential(self.burst_seconds * (1 if bursting else 4))


class Requests:
    """Requests in order of their number, the same for every planner, however many are drawn at a time."""

    def __init__(self, workload: Workload, seed: int):
        self.workload = workload
        self._rngs = [np.random.default_rng([seed, stream]) for stream in range(5)]
        self.arrivals = workload.arrival_times(self._rngs[4])

    def draw(self, count: int) -> dict[str, np.ndarray]:
        """The next `count` requests, arrays of that length.

        prompt, output: int64, output at least 2. difficulty: float64, standard normal. level: float64, 0 without one.
        """
        work = self.workload
        prompt, output = (
            np.exp(work.spread * rng.standard_normal(count) - work.spread**2 / 2) * mean
            for rng, mean in zip(self._rngs, (work.prompt, work.output), strict=False)
        )
        return {
            "prompt": np.maximum(prompt.round(), 1).astype(np.int64),
            "output": np.maximum(output.round(), 2).astype(np.int64),
            "difficulty": self._rngs[2].standard_normal(count),
            "level": np.where(self._rngs[3].random(count) < work.level_share, work.level, 0.0),
        }


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of drafts, in log odds: logit c_{r,k} = b_k + difficulty_r + drift_r + seen_k + unseen_k.

    conditional: [gamma] acceptance of position k given those before it, in the mean over all steps; b is fitted to it.
    difficulty, drift, seen, unseen: standard deviations, of requests, of a random walk inside a request that returns
        to its middle within about `memory` steps, and of single tokens as far as the confidence sees it and does not.
    overconfidence: the confidence's log odds are multiplied by this; 1 is calibrated.
    """

    conditional: Sequence[float]
    difficulty: float = 0.8
    drift: float = 0.5
    memory: float = 10.0
    seen: float = 1.2
    unseen: float = 0.8
    overconfidence: float = 1.0
    _bias: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not len(self.conditional) or not all(0 <= p <= 1 for p in self.conditional):
            raise ValueError(f"conditional acceptance is one number in 0..1 per position, not {self.conditional}")
        if min(self.difficulty, self.drift, self.seen, self.unseen, self.overconfidence) < 0 or self.memory < 1:
            raise ValueError("standard deviations and overconfidence are 0 or more, memory is at least 1")
        object.__setattr__(self, "_bias", self._fit())

    @property
    def gamma(self) -> int:
        return len(self.conditional)

    def drift_step(self, drift: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """[R] the next step's drift; standard normal in the long run."""
        keep = 1 - 1 / self.memory
        return keep * drift + math.sqrt(1 - keep**2) * rng.standard_normal(len(drift))

    def draft(
        self, difficulty: np.ndarray, drift: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """(confidence, acceptance) [R, gamma] each of one draft of requests with standard normal difficulty, drift."""
        shape = (len(difficulty), self.gamma)
        seen = self._bias + (self.difficulty * difficulty + self.drift * drift)[:, None]
        seen += self.seen * rng.standard_normal(shape, dtype=np.float32)
        accepted = _sigmoid(seen + self.unseen * rng.standard_normal(shape, dtype=np.float32))
        # The mean of a sigmoid over normal noise, in the probit approximation (off by less than 0.02).
        return _sigmoid(seen * (self.overconfidence / math.sqrt(1 + math.pi * self.unseen**2 / 8))), accepted

    def _fit(self) -> np.ndarray:
        """b [gamma], such that verifying all drafts observes `conditional`.

        Survivors of early positions are easy requests, and hard requests take more steps to the same length: both are
        weighed in, over a fixed sample.
        """
        rng = np.random.default_rng(0)
        outer, inner = 256, 128
        easy = self.difficulty * rng.standard_normal((outer, 1, 1)) + self.drift * rng.standard_normal(
            (outer, inner, 1)
        )
        noise = math.hypot(self.seen, self.unseen) * rng.standard_normal((outer, inner, self.gamma))
        z = easy + noise
        bias, weights = np.zeros(self.gamma), np.full((outer, 1), 1.0)
        for _ in range(4):  # the weights depend on the fit: it settles at once
            survival = np.ones((outer, inner))
            tokens = np.ones((outer, inner))
            for k, wanted in enumerate(self.conditional):
                bias[k] = _solve(z[:, :, k], survival * weights, wanted)
                survival = survival * _sigmoid(bias[k] + z[:, :, k])
                tokens = tokens + survival
            weights = 1 / tokens.mean(1, keepdims=True)
        return bias


def _solve(z: np.ndarray, weights: np.ndarray, wanted: float) -> float:
    """b with the weighted mean of sigmoid(b + z) as wanted, by bisection."""
    low, high = -40.0, 40.0
    for _ in range(40):
        middle = (low + high) / 2
        if float(np.vdot(weights, _sigmoid(middle + z))) < wanted * float(weights.sum()):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
