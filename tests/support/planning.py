"""Step-cost models of given curves, step views, brute force."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from outrider.scheduler import registry
from outrider.scheduler.baselines import VerifyAll
from outrider.scheduler.buckets import TokenBuckets
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.contract import Budget, Planner, StepView
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.server.plugin.decode.requests import RequestTable
from outrider.server.plugin.decode.step import Admission, Step, StepDrafts


def curve_cost(requests: int, seconds: list[float], draft: float = 0.0) -> StepCost:
    """T(requests, requests + K) = seconds[K]; drafting takes `draft`."""
    points = [Point(requests, requests + k, 0, (s,)) for k, s in enumerate(seconds)]
    if draft:
        points.append(Point(requests, 0, 0, (draft,)))
    return StepCost(points)


def view(
    requests: int,
    gamma: int,
    *,
    rows: list[int] | None = None,
    generations: list[int] | None = None,
    limits: list[int] | None = None,
    levels: list[float] | None = None,
    progress: list[float] | None = None,
    ruled: list[bool] | None = None,
) -> StepView:
    return StepView(
        rows=np.array(rows if rows is not None else range(requests)),
        generations=np.array(generations or [1] * requests),
        contexts=np.zeros(requests, dtype=np.int64),
        limits=np.array(limits if limits is not None else [gamma] * requests),
        levels=np.array(levels or [0.0] * requests),
        progress=np.array(progress or [np.inf] * requests),
        ruled=None if ruled is None else np.array(ruled),
    )


class Request(SimpleNamespace):
    """A request that may be held weakly and in sets, as SGLang's."""

    __hash__ = object.__hash__


def request(prompt: int = 10, new_tokens: int = 1 << 20, ends: tuple[int, ...] = (), **sampling: Any) -> Request:
    """The part of SGLang's `Req` that the worker reads. prompt, new_tokens: lengths. ends: end tokens."""
    params = {"custom_params": None, "sampling_seed": 1, "top_k": 1, "ignore_eos": False, "stop_token_ids": None}
    params |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    params |= dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag"))
    params |= sampling
    return Request(
        sampling_params=SimpleNamespace(max_new_tokens=new_tokens, **params), origin_input_ids=[1] * prompt,
        eos_token_ids=set(ends), tokenizer=None, multimodal_inputs=None,
    )  # fmt: skip


def shifted(shift: float, gamma: int) -> CalibrationTable:
    """Adds `shift` to the log odds of every confidence."""
    return CalibrationTable.of({name: Calibration((1.0,) * gamma, (shift,) * gamma) for name in CLASSES}, gamma)


def step_of(requests: int, gamma: int, budget: Budget | None = None) -> Step:
    """A new step of requests without options."""
    table = RequestTable(requests, gamma, "cpu")
    table.admit([request() for _ in range(requests)], torch.arange(requests))
    entries, budget = table.entries(np.arange(requests)), budget or Budget(draft=True, tokens=None)
    return Step(
        planner=VerifyAll(), view=(seen := view(requests, gamma)), budget=budget,
        draft_mask=budget.draft_mask(seen.limits), entries=entries, classes=torch.zeros(requests, dtype=torch.int64),
        began=0.0, planner_seconds=0.0,
    )  # fmt: skip


def step_drafts(
    confidence: np.ndarray,
    verify_lens: np.ndarray,
    accept_lens: np.ndarray,
    *,
    draft_lens: np.ndarray | None = None,
    classes: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    budget: Budget | None = None,
    calibration: CalibrationTable | None = None,
    **numbers: np.ndarray,
) -> StepDrafts:
    """A step and its outcome. confidence: [R, gamma]. draft_lens: gamma of each by default. numbers: [R], by column."""
    requests, gamma = confidence.shape
    step = step_of(requests, gamma, budget)
    lens = torch.from_numpy(np.full(requests, gamma) if draft_lens is None else draft_lens)
    admission = Admission(
        step=replace(step, entries=replace(step.entries, numbers=numbers)),
        classes=torch.zeros(requests, dtype=torch.int64) if classes is None else torch.from_numpy(classes),
        ends=torch.full((requests,), gamma + 1), draft_lens=lens, raw=torch.from_numpy(confidence),
        confidence=torch.from_numpy(confidence), verify_lens=torch.from_numpy(verify_lens), drafting=requests,
        looked_up=None, draft_seconds=0.0, planner_seconds=0.0,
    )  # fmt: skip
    drafts = StepDrafts(admission, torch.from_numpy(accept_lens), calibration=calibration)
    drafts.read()
    drafts.tokens = accept_lens if tokens is None else tokens
    return drafts


def every_planner(requests: int, gamma: int, buckets: TokenBuckets | None = None) -> list[Planner]:
    """A planner of each entry of the registry, one for which drafting never pays, and one of shorter drafts."""
    seconds = [1.0 + 0.07 * k + 0.3 * (k > 4) for k in range(requests * gamma + 1)]

    def make(name: str, draft: float = 0.0) -> Planner:
        return registry.make(name, gamma=gamma, threshold=0.25, cost=curve_cost(requests, seconds, draft))

    planners = [*map(make, registry.PLANNERS), make("asynchronous", 9.0), VerifyAll(2)]
    for planner in planners:
        planner.buckets = buckets
    return planners


def prefixes(lens: list[int], tokens: int) -> list[tuple[int, ...]]:
    """All verify_lens within `lens` that sum to `tokens`."""
    return [counts for counts in itertools.product(*(range(n + 1) for n in lens)) if sum(counts) == tokens]


def value(survival: np.ndarray, verify_lens: tuple[int, ...]) -> float:
    """Expected accepted draft tokens."""
    return float(sum(survival[r, :n].sum() for r, n in enumerate(verify_lens)))


def check_nothing_is_read_behind_a_token(
    planners: Sequence[Planner], block: list[list[float]], confidences: st.SearchStrategy[float], data: st.DataObject
) -> None:
    """Check a block [R, gamma] of confidences: c_{k+1..} of a request, which depend on x_k, change no decision up to
    x_k. `confidences` draws one."""
    requests, gamma = len(block), len(block[0])
    row, k = data.draw(st.integers(0, requests - 1)), data.draw(st.integers(1, gamma))
    changed = [list(values) for values in block]
    changed[row][k:] = data.draw(st.lists(confidences, min_size=gamma - k, max_size=gamma - k))
    lens = torch.full((requests,), gamma)
    for planner in planners:
        budget = planner.budget(view(requests, gamma))
        admitted = [int(planner.admit(torch.tensor(b), lens, budget)[row].clamp(max=k)) for b in (block, changed)]
        assert admitted[0] == admitted[1], planner
