"""Drafts of a round of Spiffy, made from the last forward's distributions and chosen by a planner that learns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from outrider.kernels.noise import torch_exponentials
from outrider.kernels.sampling import Rules, likeliest, target_probs
from outrider.scheduler.spiffy.graph import DraftGraph
from outrider.scheduler.spiffy.learning import RoundCost, StateAcceptance
from outrider.scheduler.spiffy.planning import RoundView, StatePlanner

from ..options import RequestOptions
from .algorithm import DenoisingStep
from .drafts import BlockOutcome, StateDraft
from .forward import OpenRows
from .policy import noise_keys, steps_of
from .proposals import Prediction, Proposals, propose
from .recording import RANKS

HEAD = 16
"""Most probable tokens from which noise chooses a sampled request's draft tokens."""
_names = itertools.count()


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request's drafting options, read once, and the time at which it was first served. name: a number unique to the
    request. began: on the host's clock."""

    name: int
    options: RequestOptions
    began: float

    @classmethod
    def of(cls, req: Any, planner: str) -> ServedRequest:
        """Return a request's record, created once. planner: the server's; verify-all does not plan, so every draft
        joins the forward."""
        if not hasattr(req, "outrider_request"):
            options = RequestOptions.from_custom_params(req.sampling_params.custom_params)
            options = replace(options, planned=options.planned and planner != "verify-all")
            req.outrider_request = cls(next(_names), options, time.perf_counter())
        record: ServedRequest = req.outrider_request
        return record

    @property
    def planned(self) -> bool:
        """True if the planner decides on drafts."""
        return self.options.enabled and self.options.planned


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round of R requests.

    rows: its blocks, without drafts. roots: of each request, the row of its open block; -1: it has none.
    reqs: SGLang's. served: their options. rules, seeds: R of each. context: their tokens in the cache, summed.
    longest: positions that a request has room for.
    """

    rows: OpenRows
    roots: list[int]
    reqs: Sequence[Any]
    served: list[ServedRequest]
    rules: Rules
    seeds: torch.Tensor
    context: float
    longest: int

    def goes_on(self, number: int, start: int) -> bool:
        """Return True if another block follows the open one of a request, which starts at `start`."""
        block, req = self.rows.tokens.shape[1], self.reqs[number]
        end = start + block
        wanted = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        return bool(end < wanted and end + block <= self.longest)

    def view(self, mask_id: int) -> RoundView:
        """Return the planner's view of the requests with an open block."""
        going = [number for number, root in enumerate(self.roots) if root >= 0]
        requests = [self.served[number] for number in going]
        levels = np.array([request.options.min_tokens_per_second or 0.0 for request in requests])
        progress = np.full(len(going), np.inf)
        if levels.any():
            now = time.perf_counter()
            for place, number in enumerate(going):
                root, request = self.roots[number], requests[place]
                revealed = int((self.rows.tokens[root] != mask_id).sum())
                had = int(self.rows.starts[root]) + revealed - len(self.reqs[number].origin_input_ids)
                if had > 0:
                    progress[place] = had / max(now - request.began, 1e-9)
        return RoundView(np.array([request.name for request in requests]), self.context, levels, progress)


@dataclass(frozen=True, slots=True)
class Proposed:
    """Drafts proposed for requests of one class, and how many of them each has, [n]."""

    sampled: bool
    proposals: Proposals
    drafted: list[int]


class HostTime:
    """Adds up the time inside it, on the host's clock."""

    def __init__(self) -> None:
        self._seconds, self._began = 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class StateDrafting:
    """Makes the drafts of a round, and learns from their acceptance after the forward. graphs: by whether a request is
    sampled. cost: of rounds."""

    def __init__(self, graphs: dict[bool, DraftGraph], cost: RoundCost, mask_id: int) -> None:
        self.graphs, self.mask_id = graphs, mask_id
        self.acceptance = {False: StateAcceptance(), True: StateAcceptance()}
        self.planner = StatePlanner(cost)
        self.deciding_time = HostTime()
        """Measures all work for drafts in a round, except the forward."""
        self._looked = False
        self._proposed: list[Proposed] = []

    # -- before the forward ---------------------------------------------------------------------------------------

    def choose(self, current: Round) -> list[StateDraft]:
        """Return the drafts of a round."""
        view = current.view(self.mask_id)
        served = any(root >= 0 and own.planned for root, own in zip(current.roots, current.served, strict=True))
        looks = served and self.planner.looks(view)
        able = [
            number
            for number, (root, own) in enumerate(zip(current.roots, current.served, strict=True))
            if root >= 0 and own.options.enabled and (looks or not own.options.planned)
        ]
        self._proposed = self._propose(able, current)
        if looks:
            self._plan(current, view)
        self._looked = looks and bool(self._proposed)
        return [
            draft
            for own in self._proposed
            for place, count in enumerate(own.drafted)
            if count
            for draft in own.proposals.drafts(place, count)
        ]

    def _propose(self, able: list[int], current: Round) -> list[Proposed]:
        """Propose drafts for the requests in `able` that have a prediction, by whether they are sampled. Requests
        without planning get all their drafts."""
        starts, states = current.rows.starts.tolist(), current.rows.tokens.numpy()
        sampled, made = (current.rules.temperatures > 0).tolist(), []
        for drawn, graph in self.graphs.items():
            numbers, limits = [], []
            for number in able:
                known, root = getattr(current.reqs[number], "outrider_prediction", None), current.roots[number]
                limit = current.served[number].options.draft_limit(len(graph))
                if limit and sampled[number] == drawn and known and known.holds(starts[root], states[root]):
                    numbers.append(number)
                    limits.append(limit)
            if numbers:
                known = [current.reqs[number].outrider_prediction for number in numbers]
                goes_on = [current.goes_on(number, own.start) for number, own in zip(numbers, known, strict=True)]
                own = propose(graph, self.acceptance[drawn], numbers, known, goes_on, limits, self.mask_id)
                planned = [current.served[number].planned for number in numbers]
                counts = [0 if own_planned else n for own_planned, n in zip(planned, own.counts, strict=True)]
                made.append(Proposed(drawn, own, counts))
        return made

    def _plan(self, current: Round, view: RoundView) -> None:
        """Let the planner decide how many drafts the planned requests get."""
        none = np.zeros(0)
        free: dict[int, tuple[list[int], int, np.ndarray, np.ndarray]] = {}
        for made in self._proposed:
            proposals, costs = made.proposals, made.proposals.rows()
            for place, (number, n) in enumerate(zip(proposals.requests, proposals.counts, strict=True)):
                if current.served[number].planned:
                    free[number] = made.drafted, place, proposals.chances[place, :n], costs[place, :n]
        going = [number for number, root in enumerate(current.roots) if root >= 0]
        chosen = self.planner.admit(
            view,
            len(current.rows) + sum(sum(made.drafted) for made in self._proposed),
            [free[number][2] if number in free else none for number in going],
            [free[number][3] if number in free else none for number in going],
        )
        for number, n in zip(going, chosen, strict=True):
            if number in free:
                drafted, place = free[number][:2]
                drafted[place] = n

    def nothing(self) -> list[StateDraft]:
        """Drop all chosen drafts: there is no room for them."""
        self._proposed = []
        return []

    # -- after the forward ----------------------------------------------------------------------------------------

    def remember(
        self,
        current: Round,
        rows: OpenRows,
        masked: torch.Tensor,
        logits: torch.Tensor,
        step: DenoisingStep,
        blocks: list[BlockOutcome | None],
    ) -> None:
        """Store the forward's predictions for still masked tokens with each request that may draft in the next round.
        rows, masked, logits: with drafts, as in `BlockForward.run`. blocks: the outcome of each request's block."""
        rests = self.planner.rests
        going = [
            number
            for number, (block, request) in enumerate(zip(blocks, current.served, strict=True))
            if block is not None
            and request.options.enabled
            and not (request.options.planned and rests)
            and (block.newest == self.mask_id).any()
        ]
        if not going:
            return
        open_blocks = [block for number in going if (block := blocks[number]) is not None]
        newest = torch.from_numpy(np.stack([block.newest for block in open_blocks]))
        at = torch.tensor([block.row for block in open_blocks])
        place = torch.full(masked.shape, -1).masked_scatter(masked, torch.arange(len(logits)))[at]
        which, where = (newest == self.mask_id).nonzero(as_tuple=True)
        owner = torch.tensor(going)[which]
        rules, steps = current.rules.of(owner), steps_of(newest, self.mask_id)[which]
        keys = noise_keys(current.seeds[owner], rows.starts[at[which]] + where, steps, rules.temperatures)
        count = max(graph.vocabulary_ranks for graph in self.graphs.values())
        if any(current.served[number].options.replayed for number in going):
            count = max(count, RANKS)
        logit_rows = place[which, where]
        best, chances = likely_tokens(logits[logit_rows], rules, keys, count, step.confidence[logit_rows])
        tokens = torch.zeros(*newest.shape, count, dtype=torch.int64)
        probabilities = torch.zeros(*newest.shape, count)
        tokens[which, where], probabilities[which, where] = best, chances
        starts = rows.starts[at].tolist()
        for number, start, state, t, p in zip(going, starts, newest, tokens, probabilities, strict=True):
            current.reqs[number].outrider_prediction = Prediction(start, state.numpy(), t.numpy(), p.numpy())

    def learn(self, current: Round, stepped: np.ndarray, blocks: list[BlockOutcome | None]) -> None:
        """Learn how often drafts are accepted, and how many tokens a step reveals.

        stepped: [N, B] all rows, one step on.
        """
        for made in self._proposed:
            requests = made.proposals.requests
            paths = [block.accepted if (block := blocks[number]) else [] for number in requests]
            after = stepped[[current.roots[number] for number in requests]]
            made.proposals.observe(after, made.drafted, paths, self.acceptance[made.sampled])
        opened = [root for root in current.roots if root >= 0]
        if opened:
            states = current.rows.tokens.numpy()[opened]
            self.planner.observe_steps(len(opened), int((states != stepped[opened]).sum()))

    def decided(self, open_blocks: int) -> float:
        """End a round: return its seconds spent on drafts that the planner weighed; 0 where it weighed none."""
        seconds = self.deciding_time.take()
        if not self._looked:
            return 0.0
        self.planner.observe_deciding(seconds, open_blocks)
        return seconds


def likely_tokens(
    logits: torch.Tensor, rules: Rules, keys: torch.Tensor, count: int, confidence: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [M, count] int64, the likeliest first, and their probabilities [M, count] float32 from logits [M,
    V].

    rules: M of each.
    keys: [M], of the noise of the next step. A sampled request's tokens come in the order in which this noise prefers
        them, so the first is the next draw unless the distribution changes.
    confidence: [M] as in `policy.predict`, at temperature 0 the first one's probability.
    """
    greedy = rules.temperatures <= 0
    if bool(greedy.all()):
        scores, tokens = likeliest(logits, min(count, logits.shape[1]))
        return tokens, confidence[:, None] * (scores - scores[:, :1]).exp()
    head = min(max(HEAD, count), logits.shape[1])
    warm = Rules(rules.temperatures.masked_fill(greedy, 1.0), *rules[1:])
    probs, tokens = target_probs(logits, warm).topk(head, 1)
    waits = torch_exponentials(keys, tokens).masked_fill(greedy[:, None], 1.0) / probs.double()
    order = waits.argsort(dim=1, stable=True)[:, :count]
    return tokens.gather(1, order), probs.gather(1, order)
