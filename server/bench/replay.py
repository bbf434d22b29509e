"""Planners under load, without the hardware: users who get answers of which every position's draft is known.

A recording of real answers keeps the drafts that a drafter and prompt lookup would have made at every token, and how
many tokens the target accepts. At temperature 0 a text does not depend on its drafts, so a recording replays exactly.
Answers can also be made up from acceptance by position.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import torch

from outrider.kernels.drafts import survival_of
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.contract import FinishedStep, Planner, StepView
from outrider.scheduler.cost.model import StepCost

MADE_ANSWERS = 64
CONCENTRATION = 3.0
"""Made-up chances of a position are drawn from a beta distribution: the smaller this, the more they differ."""


@dataclass(frozen=True, slots=True)
class Positions:
    """P positions of A answers; at position p of an answer its token p is the last that is known.

    starts: [A + 1] int64, first position of each answer. prompts: [A] int64, tokens before it.
    model, lookup: [P, gamma] and [P, longest] float16, raw confidences.
    model_kept, lookup_kept: [P] int8, draft tokens accepted. lookup_lens: [P] int8, tokens found; 0: no match.
    """

    starts: np.ndarray
    prompts: np.ndarray
    model: np.ndarray
    lookup: np.ndarray
    model_kept: np.ndarray
    lookup_kept: np.ndarray
    lookup_lens: np.ndarray

    @classmethod
    def made_up(cls, conditional: Sequence[float], prompt: int, output: int) -> Self:
        """Answers of `output` tokens, without lookups, with true confidences.

        conditional: mean chance of each draft token if the earlier ones are accepted; raises ValueError for one outside
        0..1.
        """
        if not all(0 <= chance <= 1 for chance in conditional):
            raise ValueError(f"acceptance is one number in 0..1 per position, not {conditional}")
        rng, shape = np.random.default_rng(0), (MADE_ANSWERS * output, len(conditional))
        means = np.clip(conditional, 1e-9, 1 - 1e-9)
        chances = rng.beta(CONCENTRATION * means, CONCENTRATION * (1 - means), shape)
        kept = (rng.random(shape) < chances).cumprod(1).sum(1).astype(np.int8)
        nothing = np.zeros(len(kept), dtype=np.int8)
        starts = np.arange(MADE_ANSWERS + 1) * output
        prompts = np.full(MADE_ANSWERS, prompt)
        return cls(starts, prompts, chances.astype(np.float16), np.zeros(shape, np.float16), kept, nothing, nothing)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ValueError where the file is no recording."""
        try:
            with np.load(path) as found:
                return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is not a recording of drafts: {error}") from None


@dataclass(frozen=True, slots=True)
class Drafting:
    """The part of a recording that a drafter serves: calibrated confidences, and who drafts.

    threshold: accepted tokens expected of a lookup from which it is taken without the model's draft.
    run: accepted tokens expected of the model's draft over its chance of the first.
    """

    positions: Positions
    model: np.ndarray
    lookup: np.ndarray
    threshold: float
    run: float

    @classmethod
    def of(cls, positions: Positions, table: CalibrationTable | None, threshold: float, run: float) -> Self:
        """Calibrated by the greedy classes of `table`; None: as recorded."""
        model, lookup = (found.astype(np.float32) for found in (positions.model, positions.lookup))
        if table is not None:
            model = table.by_class[CLASSES.index("greedy, model")].apply(model)
            lookup = table.by_class[CLASSES.index("greedy, lookup")].of_length(lookup.shape[1]).apply(lookup)
        return cls(positions, model.astype(np.float32), lookup.astype(np.float32), threshold, run)

    def draft(
        self, place: np.ndarray, mask: np.ndarray, depth: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
        """Confidence [R, longest], lens [R], kept [R], looked_up [R] at positions `place` [R] where the model may draft
        for `mask` [R], and for how many it did: as `drafters/lookup_first.py` decides."""
        found, gamma = self.positions, self.model.shape[1]
        shown, lens = self.lookup[place], found.lookup_lens[place].astype(np.int64)
        raw = found.lookup[place].astype(np.float32) * (lens > 0)[:, None]
        expected = raw[:, :gamma].cumprod(1).sum(1)
        drafting = mask & (expected < self.threshold)
        better = drafting & (expected < self.run * found.model[place, 0].astype(np.float32))
        reach = gamma if depth is None else min(depth, gamma)
        shown[lens == 0] = 0.0
        shown[better] = 0.0
        shown[better, :reach] = self.model[place[better], :reach]
        lens[better] = reach
        kept = np.where(better, found.model_kept[place], found.lookup_kept[place])
        return shown, lens, kept, ~better, int(drafting.sum())


class Replay:
    """R users who each get one answer after another, decoded with a planner.

    planner: with a cost model of its own. cost: real times of steps, drift included. host: seconds of looking up and
    admitting, of a step and of each request; the planner's time on this machine is added. noise: standard deviation of
    the logarithm of a step's time. levels: [R] users' service levels in tokens per second, 0: none.
    """

    def __init__(
        self,
        planner: Planner,
        cost: StepCost,
        drafting: Drafting,
        requests: int,
        *,
        seed: int = 0,
        noise: float = 0.05,
        host: tuple[float, float] = (8e-5, 1e-5),
        levels: np.ndarray | None = None,
    ):
        self.planner, self.cost, self.drafting, self.host, self.noise = planner, cost, drafting, host, noise
        planner.block = drafting.model.shape[1]
        self._rng = np.random.default_rng(seed)  # of times
        self._draws = np.random.default_rng([seed, 1])  # of answers, resampled
        count = len(drafting.positions.prompts)
        self._answer = self._draws.integers(0, count, requests)
        lengths = np.diff(drafting.positions.starts)[self._answer]
        self._done = (lengths * self._draws.random(requests)).astype(np.int64)
        self._generation = np.zeros(requests, dtype=np.int64)
        self._levels = np.zeros(requests) if levels is None else levels
        self._received, self._waited = np.zeros(requests), np.zeros(requests)  # since an answer began
        self.tokens, self.good, self.seconds = 0, 0, 0.0  # good: tokens of requests that have their level

    def run(self, steps: int, warm: int) -> float:
        """Tokens per second of `steps` steps, after as many as `warm`."""
        for number in range(warm + steps):
            if number == warm:
                self.tokens, self.good, self.seconds = 0, 0, 0.0
            self._step()
        return self.tokens / self.seconds

    def _step(self) -> None:
        positions, planner = self.drafting.positions, self.planner
        requests, longest = len(self._answer), positions.lookup.shape[1]
        view = StepView(
            rows=np.arange(requests),
            generations=self._generation.copy(),
            contexts=positions.prompts[self._answer] + self._done,
            limits=np.full(requests, longest),
            levels=self._levels,
            progress=np.divide(self._received, self._waited, np.full(requests, np.inf), where=self._waited > 0),
        )
        began = time.thread_time()
        budget = planner.budget(view)
        planning = time.thread_time() - began
        mask = budget.draft_mask(view.limits)
        accept_lens = np.ones(requests, dtype=np.int64)
        verify_lens = np.zeros(requests, dtype=np.int64)
        survival, looked_up, drafting, host, drafts = np.zeros((requests, longest), np.float32), None, 0, 0.0, 0.0
        place = positions.starts[self._answer] + self._done
        left = positions.starts[self._answer + 1] - place
        if mask.any() or budget.look_up:
            shown, lens, kept, looked_up, drafting = self.drafting.draft(place, mask, budget.depth)
            lens = np.minimum(lens, left)
            began = time.thread_time()
            shown_tensor, lens_tensor = torch.from_numpy(shown), torch.from_numpy(lens)
            verify_lens = planner.admit(shown_tensor, lens_tensor, budget).numpy()
            planning += time.thread_time() - began
            survival = survival_of(shown_tensor, lens_tensor).numpy()
            accept_lens = np.minimum(kept, verify_lens) + 1
            host = self.host[0] + self.host[1] * requests
            drafts = drafting * (1.0 if budget.depth is None else min(budget.depth / self.drafting.model.shape[1], 1.0))
        jitter = math.exp(self.noise * self._rng.standard_normal())
        draft_seconds = self.cost.draft_seconds(drafts) * jitter if drafting else 0.0
        tokens, context = requests + int(verify_lens.sum()), float(view.contexts.sum())
        seconds = float(self.cost.seconds(requests, np.array([tokens]), context)[0]) * jitter + draft_seconds + host
        began = time.thread_time()
        planner.observe(
            FinishedStep(
                view=view,
                survival=survival,
                verify_lens=verify_lens,
                accept_lens=accept_lens,
                draft_mask=mask,
                drafting=drafting,
                looked_up=looked_up,
                depth=budget.depth,
                tokens=tokens,
                seconds=seconds + planning,
                draft_seconds=draft_seconds,
                host_seconds=host + planning,
            )
        )
        seconds += planning + time.thread_time() - began
        self.seconds += seconds
        self._waited += seconds
        brought = np.minimum(accept_lens, left)
        self._done += brought
        self._received += brought
        self.tokens += int(brought.sum())
        self.good += int(brought[self._received >= self._levels * self._waited].sum())
        over = np.flatnonzero(brought == left)
        self._answer[over] = self._draws.integers(0, len(positions.prompts), len(over))
        self._done[over] = self._received[over] = self._waited[over] = 0
        self._generation[over] += 1
