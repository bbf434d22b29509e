"""Answers over several decode steps have exactly the target's distribution: every outcome of drafting and acceptance is
followed through the worker's own planning and acceptance.

Confidences depend on earlier drafted tokens: a second draft is likely after A, not after B.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from chi_square import distance
from enumeration import Enumeration, Found, exact
from measured_acceptance import Acceptance, Batch, Kind, Text, Verified
from planning import curve_cost
from table_models import DenoisingModel, TableModel

from outrider.drafters import lookup_first
from outrider.drafters.base import Drafter
from outrider.drafters.diffusion import denoise
from outrider.drafters.diffusion.denoise import make_schedule
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.kernels import acceptance
from outrider.kernels.cpu import native
from outrider.kernels.drafts import survival_of
from outrider.scheduler import history
from outrider.scheduler.baselines import Synchronous, Threshold, VerifyAll
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.contract import Planner
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.planner import Asynchronous
from outrider.server.plugin.decode import sampling as worker_sampling
from outrider.server.plugin.decode.sampling import Sampling
from outrider.server.plugin.options import RequestOptions

EXACT, SEEN = 1e-6, 0.01
"""Total variation by rounding, and by a planted fault at least."""
TARGET = torch.tensor([[0.7, 0.3], [0.4, 0.6]])
Q = torch.tensor([[[0.5, 0.5], [0.4, 0.6]], [[0.6, 0.4], [0.3, 0.7]], [[0.8, 0.2], [0.5, 0.5]]])
CONFIDENCE = torch.tensor([[0.8, 0.5], [0.9, 0.1], [0.7, 0.3]])
REPEATING = (0, 0, 1, 0, 1)
SAMPLED, GREEDY = Kind(), Kind(temperature=0)


def model(gamma: int, *, shortens: bool = False) -> TableModel:
    return TableModel(Q[:gamma], CONFIDENCE[:gamma], shortens=shortens)


@dataclass(frozen=True)
class Scene:
    """A served case.

    model: tokens that the model drafts, 0: no model. lookup: tokens of a lookup. steps: of denoising; 0: a table
    drafts token by token. by_block: the verification rule. also: see `Enumeration`.
    """

    planner: Callable[[], Planner]
    kinds: tuple[Kind, ...] = (SAMPLED,)
    model: int = 3
    lookup: int = 0
    length: int = 5
    shortens: bool = False
    prompt: Text = REPEATING
    steps: int = 0
    by_block: bool = True
    also: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Found:
        return self.ways().run()

    def ways(self) -> Enumeration:
        accepting = Acceptance(logits, self.kinds, by_block=self.by_block)
        table = model(self.model, shortens=self.shortens) if self.model else None
        if self.steps:
            table = DenoisingModel(self.model, len(TARGET), make_schedule(self.model, self.steps))
        drafter: Drafter | None = table
        if self.lookup:
            lookup = NgramDrafter(self.lookup)
            drafter = lookup if table is None else LookupFirst(lookup, table, expected_run_length=1.5)
        prompts = [self.prompt] * len(self.kinds)
        return Enumeration(prompts, accepting, drafter, table, self.planner(), self.length, len(TARGET), **self.also)

    def exact(self) -> dict[tuple[Text, ...], float]:
        return exact([plain(kind) for kind in self.kinds], [self.prompt] * len(self.kinds), self.length)


def logits(batch: Batch) -> torch.Tensor:
    return TARGET[batch.flat.input_ids].log()


def plain(kind: Kind) -> Callable[[Text], list[float]]:
    """The next token's probabilities without speculation; with a seed, by its own draw."""
    table = TARGET.double() / TARGET.double().sum(1, keepdim=True)
    if kind.temperature == 0:
        table = torch.nn.functional.one_hot(table.argmax(1)).double()
    if kind.seed is None:
        return lambda text: table[text[-1]].tolist()
    alone = Acceptance(logits, (kind,))
    return lambda text: [float(token == alone.of(Verified(text, ()))[0][0][0]) for token in range(len(TARGET))]


def dear(deciding: float = 0.0) -> StepCost:
    """Drafts pay for requests with a likely one two steps ago."""
    drafts = [Point(n, 0, 0, (0.5 * n,)) for n in (1, 2)]
    cost = StepCost([*(Point(2, 2 + k, 0, (1.0 + 0.1 * k,)) for k in range(5)), *drafts])
    cost.observe_deciding(2, deciding)
    return cost


def by_depth() -> StepCost:
    drafts = [Point(1, 0, 0, (0.05,)), Point(2, 0, 0, (0.1,))]
    return StepCost([*(Point(2, 2 + k, 0, (1.0 + 0.1 * k,)) for k in range(5)), *drafts])


def alone(seconds: list[float], gamma: int = 3, **options: int) -> Callable[[], Planner]:
    """The planner of one request; seconds by verified drafts."""
    return lambda: Asynchronous(curve_cost(1, seconds), gamma, **options)


def together(cost: Callable[[], StepCost], gamma: int = 2) -> Callable[[], Planner]:
    return lambda: Asynchronous(cost(), gamma, smoothing=1, held=1)


def one_budget() -> StepCost:
    """Of two requests' four drafts, three pay, the fourth never does."""
    return curve_cost(2, [1.0, 1.1, 1.2, 1.3, 2.5])


def one_budget_for_both() -> StepCost:
    """Three drafts of the model or of lookup pay, more never do."""
    return curve_cost(2, [1.0, 1.1, 1.2, 1.3, *(2.5 + 0.1 * k for k in range(5))], draft=0.1)


STEEP, FLAT = [1.0, 1.2, 1.6, 2.0], [1.0, 1.1, 1.15, 1.2, 1.25]
PAIR = (SAMPLED, SAMPLED)
SCENES = {
    "verify all": Scene(VerifyAll),
    "threshold": Scene(lambda: Threshold(0.5)),
    "synchronous": Scene(lambda: Synchronous(curve_cost(1, STEEP))),
    "asynchronous": Scene(alone(STEEP, smoothing=1, held=1), length=6),
    "several steps looked at": Scene(alone(STEEP, held=1), length=6),
    "held plans": Scene(alone(STEEP), length=6),
    "one budget": Scene(together(one_budget), PAIR, model=2, length=4),
    "whether the model drafts": Scene(together(dear), PAIR, model=2, length=4),
    "synchronous, one budget": Scene(lambda: Synchronous(one_budget()), PAIR, model=2, length=4),
    "lookups": Scene(VerifyAll, model=0, lookup=4),
    "lookups first": Scene(alone(FLAT, 4, smoothing=1, held=1), model=2, lookup=4, length=6),
    "lookups and models together": Scene(together(one_budget_for_both, 4), PAIR, model=2, lookup=4, length=4),
    "resting": Scene(together(lambda: dear(0.4), 3), PAIR, model=2, lookup=3, length=4),
    "shortened": Scene(together(by_depth), model=2, shortens=True, length=6),
    "denoising": Scene(VerifyAll, steps=2),
    "denoising, threshold": Scene(lambda: Threshold(0.15), steps=3),
    "denoising, lookups": Scene(lambda: Threshold(0.1), steps=2, lookup=3, length=6),
    "ends": Scene(together(one_budget), PAIR, model=2, length=4, also={"ends": (1,)}),
    "one not planned": Scene(
        together(one_budget), PAIR, model=2, length=4,
        also={"options": [RequestOptions(), RequestOptions(planned=False)]},
    ),
    "calibrated": Scene(
        together(one_budget), PAIR, model=2, length=4,
        also={"calibration": CalibrationTable.of(dict.fromkeys(CLASSES, Calibration((2.0, 0.5), (0.3, -0.2))), 2)},
    ),
    "greedy beside": Scene(together(one_budget), (SAMPLED, GREEDY), model=2, length=4),
    "seeded beside": Scene(together(one_budget), (SAMPLED, Kind(seed=5)), model=2, length=4),
}  # fmt: skip


DIFFER = {"threshold", "synchronous", "several steps looked at", "held plans", "lookups and models together"}
INFLUENCE = {"one budget", "synchronous, one budget", "lookups and models together", "seeded beside"}
LEARN = {"asynchronous", "whether the model drafts", "lookups first", "lookups and models together", "resting"}


KERNELS = [(name, "compiled") for name in SCENES] + [(name, "torch") for name in sorted(DIFFER | INFLUENCE)]
"""Acceptance is measured without compiled kernels; admission has other code without them."""


@pytest.mark.parametrize(("name", "compiled"), KERNELS, indirect=["compiled"])
def test_requests_have_the_targets_distribution(name, compiled):
    check(SCENES[name], name)


@pytest.mark.parametrize("name", ["verify all", "threshold", "one budget", "lookups first", "denoising, lookups"])
def test_verified_token_by_token_they_have_it_too(name):
    check(replace(SCENES[name], by_block=False), name)


def check(scene, name):
    sums = scene.run()
    assert sum(sums.texts.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance(sums.texts, scene.exact()) < EXACT
    assert sums.verified[2] > 0.2
    if name in DIFFER:  # verification depends on the draw, as far as it may
        assert sums.differed > 0.2
    if name in INFLUENCE:
        assert sums.influenced > 0.2
    if name in LEARN:  # whole steps depend on earlier draws
        rows = tuple(range(len(scene.kinds)))
        assert sum(p > 0.05 for (requests, *_), p in sums.plans.items() if requests == rows) > 1
    if scene.lookup:
        assert sums.looked_up > 0.5
    if scene.lookup and scene.model and name != "resting":
        assert sums.modelled > 0.5
    if scene.shortens:
        assert min(sums.depths[1], sums.depths[2]) > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_decides_the_text_whatever_is_drafted(seed):
    for planner in (VerifyAll, lambda: Threshold(0.4), alone(STEEP, held=1)):
        scene = Scene(planner, (Kind(seed=seed),), length=6)
        sums = scene.run()
        assert sums.texts.keys() == scene.exact().keys()
        assert sums.verified[1] > 0.5
        assert planner is not VerifyAll or sums.verified[3] > 0.5


def test_learnt_acceptance_may_be_used_at_once(monkeypatch):
    """The correction trusts single outcomes."""
    monkeypatch.setattr(history.Correction, "SURE", 0.1)
    for name in ("several steps looked at", "one budget", "whether the model drafts", "lookups first"):
        scene = SCENES[name]
        sums = scene.run()
        assert distance(sums.texts, scene.exact()) < EXACT
        assert sums.verified[2] > 0.2


# -- faults -----------------------------------------------------------------------------------------------------------


def a_tenth_kept(batch):
    """Keeps a tenth of wrong drafts."""
    if batch.uniforms is None:
        return acceptance.accept(batch)
    return acceptance.accept(batch._replace(uniforms=((batch.uniforms - 0.1) / 0.9).clamp(min=0)))


def replaced_from_p(batch):
    """Draws the replacement from p instead of the residual."""
    lens, out = acceptance.accept(batch)
    if batch.probs is None:
        return lens, out
    final = acceptance.gumbel_argmax(batch.probs[batch.qo_indptr[:-1].long() + lens - 1], batch.final_keys)
    return lens, out.scatter(1, lens[:, None] - 1, final[:, None])


@pytest.mark.parametrize("by_block", [True, False], ids=["block", "token"])
@pytest.mark.parametrize("fault", [a_tenth_kept, replaced_from_p])
@pytest.mark.parametrize("name", ["verify all", "one budget", "lookups", "lookups first"])
def test_a_wrong_acceptance_is_detected(name, fault, by_block, monkeypatch):
    monkeypatch.setattr(worker_sampling, "accept", fault)
    scene = replace(SCENES[name], by_block=by_block)
    assert distance(scene.run().texts, scene.exact()) > SEEN


APPENDIX = [1.0, 2.0, 1 / 0.45]
"""DSpark's appendix A, where a second draft makes up for the first."""


class BestOfThis(Asynchronous):
    """The current step's throughput curve decides."""

    def admit(self, confidence, draft_lens, budget):
        survival = survival_of(confidence, draft_lens)[0]
        throughput = torch.cat([torch.ones(1), 1 + survival.cumsum(0)]) / torch.tensor(APPENDIX)
        return throughput.argmax(keepdim=True) if budget.draft else torch.zeros_like(draft_lens)


class SureToTheEnd(VerifyAll):
    """A draft with an unlikely second token, once drawn, is not verified."""

    def admit(self, confidence, draft_lens, budget):
        return torch.where(confidence[:, 1] > 0.5, draft_lens, 0)


@pytest.mark.parametrize(
    "planner",
    [lambda: BestOfThis(curve_cost(1, APPENDIX), 2, smoothing=1, held=1), SureToTheEnd],
    ids=["budget", "second confidence"],
)
def test_a_look_ahead_is_detected(planner):
    """In appendix A, 0.7 and 0.3 become 0.85 and 0.15."""
    scene = Scene(planner, model=2, length=4, prompt=(0, 1, 0))
    sums = scene.run()
    assert sums.verified[2] > 0.2
    assert distance(sums.texts, scene.exact()) > SEEN
    assert sum(p for (text,), p in sums.texts.items() if text[0] == 0) == pytest.approx(0.85, abs=EXACT)


def test_drafts_kept_by_another_seed_are_detected(monkeypatch):
    honest = Sampling.accept

    def by_another(self, logits, draft, verify_lens, flat):
        lens, out = honest(replace(self, seeds=self.seeds + 1), logits, draft, verify_lens, flat)
        rows = flat.qo_indptr[:-1].long() + lens - 1
        final = self._draw(logits, rows, flat.request[rows], flat.positions[rows])
        return lens, out.scatter(1, lens[:, None] - 1, final[:, None])

    scenes = [Scene(VerifyAll, (Kind(seed=seed),), length=5) for seed in range(3)]
    expected = [scene.exact() for scene in scenes]
    monkeypatch.setattr(Sampling, "accept", by_another)
    for scene, exactly in zip(scenes, expected, strict=True):
        assert scene.run().texts.keys() != exactly.keys()


def by_the_models_q(draft, drafted, asked):
    draft.probs[asked] = drafted.probs


def by_a_point_mass_elsewhere(draft, drafted, asked):
    draft.probs[draft.looked_up] = draft.probs[draft.looked_up].flip(2)


@pytest.mark.parametrize("fault", [by_the_models_q, by_a_point_mass_elsewhere])
def test_a_lookup_verified_by_another_q_is_detected(fault, monkeypatch):
    honest = lookup_first.merge

    def merged(found, drafted, asked, better, temperatures):
        draft = honest(found, drafted, asked, better, temperatures)
        fault(draft, drafted, asked)
        return draft

    monkeypatch.setattr(lookup_first, "merge", merged)
    scene = replace(SCENES["lookups first"], planner=VerifyAll)
    assert distance(scene.run().texts, scene.exact()) > SEEN


def test_denoised_tokens_with_the_q_of_their_neighbours_are_detected(monkeypatch):
    draw = denoise.draw_independently

    def swapped(*args, **given):
        tokens, q, sure = draw(*args, **given)
        return tokens, None if q is None else q.roll(1, 1), sure

    monkeypatch.setattr(denoise, "draw_independently", swapped)
    assert distance(SCENES["denoising"].run().texts, SCENES["denoising"].exact()) > SEEN


# -- with compiled kernels --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
@pytest.mark.parametrize("name", ["verify all", "lookups first", "one budget"])
def test_compiled_kernels_decide_as_the_measured_acceptance(name, monkeypatch):
    """Every acceptance of the enumeration runs with several random numbers."""
    ways = SCENES[name].ways()
    ways.run()
    for with_q in (True, False):
        items = [item for item in ways.acceptance.known if (item.q is not None) == with_q] * 64
        batch, sampling = ways.acceptance.batch(items), ways.acceptance.sampling(items)
        sampling = replace(sampling, seeds=torch.arange(len(items)))
        given = logits(batch), batch.draft, batch.verify_lens, batch.flat
        compiled = sampling.accept(*given)
        with monkeypatch.context() as patch:
            patch.setattr(native, "available", lambda: False)
            plain = sampling.accept(*given)
        assert torch.equal(compiled[0], plain[0])
        assert torch.equal(compiled[1], plain[1])
        assert compiled[0].unique().numel() > 1 or not with_q
