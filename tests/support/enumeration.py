"""Enumerates all outcomes of several decode steps of a tiny model, with their probabilities.

The worker's own drafting, planning, admission and acceptance run; every outcome of a draw is followed. Outcomes with
the same texts and planner inputs are merged.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from measured_acceptance import Acceptance, Text, Verified
from planning import request
from prometheus_client import CollectorRegistry
from table_models import TableModel

from outrider.drafters.base import Draft, Drafter, Features
from outrider.kernels.drafts import survival_of
from outrider.scheduler.calibration.classes import classes_of
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.contract import Planner
from outrider.server.plugin.decode.boundary import Boundary
from outrider.server.plugin.decode.draft import DraftStage
from outrider.server.plugin.decode.flatten import StepBatch
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.plan import StepPlanner
from outrider.server.plugin.decode.requests import RequestTable
from outrider.server.plugin.decode.step import Admission, Step
from outrider.server.plugin.options import RequestOptions

CONTEXT = 32


@dataclass
class Found:
    """Sums over all outcomes.

    texts: probability of the requests' texts. The rest are expected numbers. verified: drafts of a request, by
    position. looked_up, modelled: verified drafts. depths: blocks, by requested depth. rested: steps without drafts.
    plans: steps, by their requests, the requests drafted for, and the largest number of verified drafts. differed:
    requests and steps in which the number of verified drafts depended on the draw; influenced: on another request's
    draw.
    """

    texts: dict[tuple[Text, ...], float] = field(default_factory=lambda: defaultdict(float))
    verified: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    depths: dict[int | None, float] = field(default_factory=lambda: defaultdict(float))
    plans: dict[tuple[Any, ...], float] = field(default_factory=lambda: defaultdict(float))
    looked_up: float = 0.0
    modelled: float = 0.0
    differed: float = 0.0
    influenced: float = 0.0
    rested: float = 0.0


class Drawn(NamedTuple):
    """One outcome of a step's draws. draws: the model's tokens by row."""

    chance: float
    draws: dict[int, Text]
    draft: Draft
    admission: Admission


class Seen(NamedTuple):
    """The planner's knowledge: steps up to `step`, and its outcome; None at the start."""

    planning: StepPlanner
    step: Step | None
    admission: Admission | None
    accept_lens: Text


class Enumeration:
    """Requests with `prompts` that generate `length` tokens each, sampled by `acceptance`.

    A prompt's last token is the first anchor. model: the part of `drafter` that draws, or None. ends: tokens after
    which no draft is verified; requests continue here. options: of each request. grammar: of a request with this text.
    """

    def __init__(
        self,
        prompts: Sequence[Text],
        acceptance: Acceptance,
        drafter: Drafter,
        model: TableModel | None,
        planner: Planner,
        length: int,
        vocabulary: int,
        *,
        ends: Text = (),
        options: Sequence[RequestOptions] | None = None,
        calibration: CalibrationTable | None = None,
        grammar: Callable[[Text], Any] = lambda text: None,
    ):
        self.prompts, self.acceptance, self.drafter, self.model = prompts, acceptance, drafter, model
        self.length, self.vocabulary, self.grammar = length, vocabulary, grammar
        count = len(prompts)
        self.page_table = torch.arange(count * CONTEXT, dtype=torch.int32).view(count, CONTEXT)
        drafter.allocate(count * CONTEXT)
        self.table = RequestTable(count, drafter.gamma, "cpu")
        reqs = [
            request(
                len(prompt) - 1, length + 1, ends, top_k=1 if kind.temperature == 0 else -1, sampling_seed=kind.seed,
                custom_params=option.to_custom_params(),
            )
            for prompt, kind, option in zip(
                prompts, acceptance.kinds, options or [RequestOptions()] * count, strict=True
            )
        ]  # fmt: skip
        self.table.admit(reqs, torch.arange(count))
        self.metrics = SpeculationMetrics(drafter.gamma, "table", CollectorRegistry())
        block = model.gamma if model is not None and model.shortens else None
        if planner.cost is not None:  # the time that the test takes is random
            vars(planner.cost).update(observe=lambda *_: None, observe_deciding=lambda *_: None)
        self.start = StepPlanner(planner, calibration, self.table, self.metrics, "cpu", block=block)
        self.draft = DraftStage(self.table, Boundary(), ages=False)

    def run(self) -> Found:
        sums = Found()
        ways: dict[int, dict[tuple[Text, ...], float]] = {0: {tuple(self.prompts): 1.0}}  # by the planner's knowledge
        seen = {0: Seen(self.start, None, None, ())}
        while ways:
            taken = []
            for name, texts_of in ways.items():
                lengths = [len(text) - len(p) for text, p in zip(next(iter(texts_of)), self.prompts, strict=True)]
                rows = np.flatnonzero(np.array(lengths) < self.length)
                if not len(rows):
                    for texts, chance in texts_of.items():
                        said = (text[len(p) :] for text, p in zip(texts, self.prompts, strict=True))
                        sums.texts[tuple(said)] += chance
                    continue
                planning = self._shown(seen[name])
                step = self._begin(planning, rows, next(iter(texts_of)))
                taken += [
                    (name, planning, texts, chance, drawn)
                    for texts, chance in texts_of.items()
                    for drawn in [list(self._drafts(planning, step, rows, texts))]
                ]
            self.acceptance.learn({item for *_, texts, _, drawn in taken for d in drawn for item in verified(texts, d)})
            ways, seen, names = {}, {}, {}
            for name, planning, texts, chance, drawn in taken:
                count(sums, drawn, chance)
                for each in drawn:
                    for after, p in self._outcomes(texts, each):
                        accepted = tuple(len(new) - len(old) for new, old in zip(after, texts, strict=True))
                        shown = name, sight(each.admission), accepted
                        if shown not in names:
                            names[shown] = len(names)
                            rows = each.admission.step.view.rows
                            lens = tuple(accepted[row] for row in rows)
                            seen[names[shown]] = Seen(planning, each.admission.step, each.admission, lens)
                        into = ways.setdefault(names[shown], defaultdict(float))
                        into[after] += chance * each.chance * p
        return sums

    # -- one step -------------------------------------------------------------------------------------------------

    def _shown(self, seen: Seen) -> StepPlanner:
        """A new planning that has observed `seen`."""
        shared = [self.table, self.metrics, seen.planning.recording]
        cost = seen.planning.planner.cost
        memo = {id(each): each for each in [*shared, cost] if each is not None}
        planning, step = copy.deepcopy((seen.planning, seen.step), memo)
        if seen.admission is not None:
            planning.finish(replace(seen.admission, step=step), torch.tensor(seen.accept_lens))
        return planning

    def _begin(self, planning: StepPlanner, rows: np.ndarray, texts: Sequence[Text]) -> Step:
        sampling = self.acceptance.sampling([Verified(texts[row], (), kind=row) for row in rows.tolist()])
        contexts = np.array([len(texts[row]) - 1 for row in rows])
        return planning.begin(rows, contexts, classes_of(sampling.rules.temperatures, sampling.seeded))

    def _drafts(self, planning: StepPlanner, step: Step, rows: np.ndarray, texts: Sequence[Text]) -> Iterator[Drawn]:
        """Every outcome of the draws, as the worker drafts and the planner admits."""
        mine = [texts[row] for row in rows]
        for row, text in zip(rows.tolist(), mine, strict=True):  # the cache holds all but the anchors
            places = torch.arange(len(text) - 1)
            slots = self.page_table[row, : len(text) - 1].long()
            self.drafter.observe(Features(None, torch.tensor(text[:-1], dtype=torch.int64), places, slots))
        sampling = self.acceptance.sampling([Verified(texts[row], (), kind=row) for row in rows.tolist()])
        anchors = torch.tensor([text[-1] for text in mine])
        seq_lens = torch.tensor([len(text) - 1 for text in mine])
        limits = dict(zip(rows.tolist(), step.view.limits.tolist(), strict=True))

        def reach(row: int, draws: Sequence[float]) -> int:
            """Number of the model's draws that have an effect."""
            return min(len(draws), limits[row])

        def drawn(draws: dict[int, Text]) -> Drawn:
            keys = torch.zeros(len(rows), self.drafter.gamma, dtype=torch.int64)
            for place, row in enumerate(rows.tolist()):
                keys[place, : len(draws.get(row, ()))] = torch.tensor(draws.get(row, ()), dtype=torch.int64)
            given: Any = SimpleNamespace(
                draft_keys=lambda positions, gamma: keys, decided=sampling.decided, all_decided=sampling.all_decided,
                all_greedy=sampling.all_greedy, rules=sampling.rules, seeds=sampling.seeds, seeded=sampling.seeded,
            )  # fmt: skip
            if self.model is not None:
                self.model.drawn = {}
            reqs = [SimpleNamespace(grammar=self.grammar(text), output_ids=[*text]) for text in mine]
            scheduled = SimpleNamespace(reqs=reqs)
            batch = StepBatch(scheduled, torch.from_numpy(rows), seq_lens, anchors, self.page_table)
            batch.sampling = given
            draft, _ = self.draft(self.drafter, batch, step)
            made = {} if self.model is None else self.model.drawn
            chance = float(np.prod([p for row, each in made.items() for p in each[: reach(row, each)]]))
            return Drawn(chance, draws, draft, planning.admit(step, draft, 0.0))

        first = drawn({})
        made = {} if self.model is None else dict(self.model.drawn)
        if not made:
            yield first
            return
        tokens = range(self.vocabulary)
        of_row = [itertools.product(tokens, repeat=reach(row, each)) for row, each in made.items()]
        for draws in itertools.product(*of_row):
            each = drawn(dict(zip(made, draws, strict=True)))
            assert self.model is not None
            assert self.model.drawn.keys() == made.keys(), "who is drafted for hangs on what is drawn"
            if each.chance > 0:
                yield each

    def _outcomes(self, texts: tuple[Text, ...], drawn: Drawn) -> Iterator[tuple[tuple[Text, ...], float]]:
        """Texts of the requests after the step, with their probabilities."""
        items = verified(texts, drawn)
        for outcome in itertools.product(*(self.acceptance.known[item] for item in items)):
            after, chance = list(texts), 1.0
            for item, (tokens, p) in zip(items, outcome, strict=True):
                after[item.kind] += tokens
                chance *= p
            yield tuple(after), chance


def verified(texts: Sequence[Text], drawn: Drawn) -> list[Verified]:
    draft, outcomes = drawn.draft, []
    lens = drawn.admission.verify_lens.tolist()
    for place, row in enumerate(drawn.admission.step.view.rows.tolist()):
        n = lens[place]
        tokens = draft.tokens[place, :n]
        q = None if draft.probs is None else draft.probs[place, :n]
        if q is not None and draft.points is not None and bool(draft.points[place]):
            q = torch.nn.functional.one_hot(tokens, draft.probs.shape[2]).to(draft.probs)
        rows = None if q is None else tuple(map(tuple, q.tolist()))
        outcomes.append(Verified(texts[row], tuple(tokens.tolist()), rows, row))
    return outcomes


def sight(admission: Admission) -> tuple[Any, ...]:
    """The planner's view of a step before its outcome, comparable."""
    looked_up = admission.looked_up
    survival = survival_of(admission.confidence, admission.draft_lens)
    return (
        survival.numpy().tobytes(),
        tuple(admission.verify_lens.tolist()),
        tuple(admission.draft_lens.tolist()),
        () if admission.ends is None else tuple(admission.ends.tolist()),
        None if looked_up is None else tuple(looked_up.tolist()),
        admission.drafting,
    )


def count(sums: Found, drawn: Sequence[Drawn], chance: float) -> None:
    """Add a step of probability `chance` to the expected numbers."""
    by_request: dict[int, set[int]] = defaultdict(set)
    by_own: dict[tuple[int, Text], set[int]] = defaultdict(set)
    step = drawn[0].admission.step
    if step.drafts:
        sums.depths[step.depth] += chance
    sums.plans[tuple(step.view.rows), tuple(step.draft_mask), step.budget.tokens] += chance
    sums.rested += chance * (not step.drafts and not step.looks_up)
    for each in drawn:
        admission, p = each.admission, chance * each.chance
        looked_up = [False] * len(step.view.rows) if admission.looked_up is None else admission.looked_up.tolist()
        for row, lookup, n in zip(step.view.rows.tolist(), looked_up, admission.verify_lens.tolist(), strict=True):
            by_request[row].add(n)
            by_own[row, each.draws.get(row, ())].add(n)
            for k in range(n):
                sums.verified[k + 1] += p
            sums.looked_up += p * n * lookup
            sums.modelled += p * n * (not lookup)
    sums.differed += chance * sum(len(lens) > 1 for lens in by_request.values())
    influenced = {row for (row, _), lens in by_own.items() if len(lens) > 1}
    sums.influenced += chance * len(influenced)


def exact(
    nexts: Sequence[Callable[[Text], Sequence[float]]], prompts: Sequence[Text], length: int
) -> dict[tuple[Text, ...], float]:
    """Distribution of answers without speculation. nexts: per request, probabilities of the token after a text."""

    def of(after: Callable[[Text], Sequence[float]], prompt: Text) -> dict[Text, float]:
        chances: dict[Text, float] = {(): 1.0}
        for _ in range(length):
            chances = {
                (*text, token): chance * p
                for text, chance in chances.items()
                for token, p in enumerate(after((*prompt, *text)))
                if p > 0
            }
        return chances

    each = [of(after, prompt).items() for after, prompt in zip(nexts, prompts, strict=True)]
    return {
        tuple(text for text, _ in texts): float(np.prod([p for _, p in texts])) for texts in itertools.product(*each)
    }
