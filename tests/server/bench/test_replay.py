"""A replay agrees with theory, drafts as the served drafter, and shows planners only the past."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from planning import curve_cost

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.lookup_first import LookupFirst
from outrider.scheduler.baselines import Synchronous, Threshold, VerifyAll
from outrider.scheduler.contract import Budget, FinishedStep, Planner, StepView
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.planner import Asynchronous
from outrider.server.bench.replay import Drafting, Positions, Replay
from outrider.server.bench.synthetic_cost import SyntheticCost

GAMMA, LONGEST = 3, 5


def recording(answers: int = 4, length: int = 60) -> Positions:
    rng = np.random.default_rng(0)
    count = answers * length
    lens = np.where(rng.random(count) < 0.5, LONGEST, 0)
    model, lookup = rng.random((count, GAMMA)), rng.random((count, LONGEST))
    return Positions(
        np.arange(answers + 1) * length, np.full(answers, 10), model.astype(np.float16), lookup.astype(np.float16),
        rng.integers(0, GAMMA + 1, count).astype(np.int8),
        np.minimum(rng.integers(0, LONGEST + 1, count), lens).astype(np.int8), lens.astype(np.int8),
    )  # fmt: skip


def test_a_recording_round_trips(tmp_path):
    recorded = recording()
    recorded.save(tmp_path / "kept.npz")
    read = Positions.load(tmp_path / "kept.npz")
    assert all(np.array_equal(getattr(recorded, name), getattr(read, name)) for name in Positions.__slots__)
    (tmp_path / "other.npz").write_text("no recording")
    with pytest.raises(ValueError, match="is not a recording"):
        Positions.load(tmp_path / "other.npz")


class Recorded(Drafter):
    def __init__(self, shown: np.ndarray, lens: np.ndarray, by_model: bool):
        self.shown, self.lens, self.by_model, self.gamma = shown, lens, by_model, shown.shape[1]
        self.target_layers = ()

    def allocate(self, slots: int) -> None:
        """Has no state."""

    def observe(self, features: Features) -> None:
        """Has no state."""

    def propose(self, batch: DraftBatch) -> Draft:
        place = batch.anchors.numpy()
        shown = torch.from_numpy(self.shown[place].copy())
        if self.by_model and batch.depth is not None:
            shown[:, batch.depth :] = 0.0
        lens = torch.from_numpy(self.lens[place].astype(np.int64))
        lens = lens.clamp(max=batch.depth) if self.by_model and batch.depth is not None else lens
        return Draft(torch.zeros_like(shown).long(), lens, shown, drafting=len(place) if self.by_model else 0)


@pytest.mark.parametrize("depth", [None, 2])
def test_drafts_are_chosen_as_by_the_served_drafter(depth):
    recorded = recording()
    drafting = Drafting.of(recorded, None, 1.2, 1.7)
    lookup = np.where(recorded.lookup_lens[:, None] > 0, recorded.lookup.astype(np.float32), 0).astype(np.float32)
    served = LookupFirst(
        Recorded(lookup, recorded.lookup_lens, by_model=False),
        Recorded(recorded.model.astype(np.float32), np.full(len(recorded.model), GAMMA), by_model=True),
        expected_run_length=1.7,
    )
    rng, place = np.random.default_rng(1), np.arange(len(recorded.model))
    mask = rng.random(len(place)) < 0.7
    shown, lens, kept, looked_up, count = drafting.draft(place, mask, depth)
    zeros = torch.zeros(len(place))
    draft = served.propose(
        DraftBatch(
            anchors=torch.from_numpy(place), seq_lens=zeros.long(), page_table=zeros[:, None].int(), rows=zeros.long(),
            temperatures=zeros, keys=zeros[:, None].long(), draft_mask=torch.from_numpy(mask), depth=depth,
        )
    )  # fmt: skip
    assert 0 < (~looked_up).sum() < count == draft.drafting
    assert np.array_equal(looked_up, draft.looked_up)
    assert np.array_equal(lens, draft.lens)
    assert np.array_equal(shown, draft.confidence)
    assert np.array_equal(kept, np.where(looked_up, recorded.lookup_kept, recorded.model_kept))


NO_HOST = {"noise": 0.0, "host": (0.0, 0.0)}


def constant(milliseconds: float, draft: float = 0.0) -> StepCost:
    """Every step takes the same time, plus the planner's real time."""
    return SyntheticCost(base=milliseconds, token=0.0, request=0.0, draft=draft, draft_request=0.0).model(7, 16_384)


def made_up(*conditional: float, output: int = 256) -> Drafting:
    return Drafting.of(Positions.made_up(conditional, 100, output), None, 1.2, 1.7)


def test_a_replay_gives_the_tokens_and_takes_the_time_of_its_steps():
    drafting = Drafting.of(recording(), None, 1.2, 1.7)
    plain = Replay(VerifyAll(0), constant(10.0), drafting, 2, **NO_HOST).run(50, 10)
    assert plain == pytest.approx(200.0, rel=0.02)
    replay = Replay(VerifyAll(), constant(10.0), drafting, 2, **NO_HOST)
    throughput = replay.run(400, 0)
    assert throughput > 1.5 * plain
    assert replay.tokens / 400 * 100 == pytest.approx(throughput, rel=0.05)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
def test_users_are_as_fast_as_theory(chance: float) -> None:
    """E[tokens of a step] = (1 - p^(gamma+1)) / (1 - p), minus the tokens cut off at an answer's end."""
    drafting = made_up(*[chance] * GAMMA, output=10_000)
    result = Replay(VerifyAll(), constant(10.0, 2.0), drafting, 32, **NO_HOST).run(400, 0)
    tokens = GAMMA + 1 if chance == 1 else (1 - chance ** (GAMMA + 1)) / (1 - chance)
    assert result == pytest.approx(32 * tokens / 0.012, rel=0.02)


def test_made_up_answers_have_the_given_acceptance() -> None:
    conditional = (0.85, 0.75, 0.7, 0.65)
    positions = Positions.made_up(conditional, 100, 1000)
    for k, wanted in enumerate(conditional):
        tested = positions.model_kept >= k
        assert (positions.model_kept[tested] > k).mean() == pytest.approx(wanted, abs=0.01)
        assert positions.model[:, k].mean() == pytest.approx(wanted, abs=0.01)
    with pytest.raises(ValueError, match=r"0\.\.1 per position"):
        Positions.made_up((0.5, 1.5), 100, 10)


@dataclass
class Seen:
    view: StepView
    confidence: np.ndarray | None = None
    verify_lens: np.ndarray | None = None
    accept_lens: np.ndarray | None = None


@dataclass
class Spy(Planner):
    """Passes all calls on, and records them."""

    planner: Planner
    steps: list[Seen] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def budget(self, step: StepView) -> Budget:
        self.calls.append("budget")
        self.steps.append(Seen(step))
        return self.planner.budget(step)

    def admit(self, confidence: torch.Tensor, draft_lens: torch.Tensor, budget: Budget) -> torch.Tensor:
        self.calls.append("admit")
        self.steps[-1].confidence = confidence.numpy().copy()
        return self.planner.admit(confidence, draft_lens, budget)

    def observe(self, step: FinishedStep) -> None:
        self.calls.append("observe")
        seen = self.steps[-1]
        assert seen.view is step.view
        seen.verify_lens, seen.accept_lens = step.verify_lens, step.accept_lens
        self.planner.observe(step)


def test_a_planner_is_shown_the_past_and_this_draft_in_that_order() -> None:
    spy = Spy(Threshold(0.4))
    replay = Replay(spy, constant(10.0), made_up(*[0.8] * GAMMA, output=20), 6, seed=1)
    replay.run(500, 0)
    assert spy.calls == ["budget", "admit", "observe"] * len(spy.steps)
    known: dict[tuple[int, int], int] = {}
    for seen in spy.steps:
        keys = list(zip(seen.view.rows.tolist(), seen.view.generations.tolist(), strict=True))
        for index, key in enumerate(keys):
            if key in known:  # the view contains the outcomes of earlier steps
                assert seen.view.contexts[index] == known[key]
            known[key] = seen.view.contexts[index] + seen.accept_lens[index]
    assert len({row for row, _ in known}) == 6
    assert len(known) > 50  # rows are reused, under another generation
    emitted = sum(int(seen.accept_lens.sum()) for seen in spy.steps)
    assert emitted - len(known) * GAMMA <= replay.tokens <= emitted  # the end of an answer cuts off one draft at most


def test_acceptance_equals_the_shown_confidence() -> None:
    """Admission by confidence does not bias acceptance."""
    spy = Spy(Threshold(0.5))
    Replay(spy, constant(10.0), made_up(*[0.8] * GAMMA), 300, seed=2).run(200, 0)
    survival = np.concatenate([seen.confidence.cumprod(1) for seen in spy.steps])
    lens = np.concatenate([seen.verify_lens for seen in spy.steps])
    runs = np.concatenate([seen.accept_lens - 1 for seen in spy.steps])
    for k in range(GAMMA):
        verified = lens > k
        assert (runs[verified] > k).mean() == pytest.approx(survival[verified, k].mean(), abs=0.015)


@pytest.mark.parametrize("size", [1, 32, 256])
def test_the_planners_are_no_worse_than_the_better_of_not_speculating_and_verifying_all(size: int) -> None:
    synthetic, drafting = SyntheticCost(), made_up(0.8, 0.75, 0.7, 0.7, 0.7)
    make: dict[str, Callable[[], Planner]] = {
        "off": lambda: VerifyAll(0),
        "all": VerifyAll,
        "sync": lambda: Synchronous(synthetic.model(5, size)),
        "async": lambda: Asynchronous(synthetic.model(5, size), 5),
    }
    results = {
        name: Replay(planner(), synthetic.model(5, size), drafting, size).run(300, 60) for name, planner in make.items()
    }
    best = max(results["off"], results["all"])
    assert results["sync"] >= 0.97 * best
    assert results["async"] >= 0.97 * best
    if size == 256:
        assert results["all"] < results["off"] < results["async"]


def test_a_planner_notices_that_the_machine_is_slower_than_its_profile() -> None:
    cost = constant(1000.0)
    Replay(Synchronous(cost), constant(1500.0), made_up(*[0.7] * GAMMA), 4, **NO_HOST).run(2000, 0)
    assert cost.drift.plain == pytest.approx(1.5, rel=0.02)


def test_ten_thousand_requests() -> None:
    synthetic = SyntheticCost()
    planner = Asynchronous(synthetic.model(7, 10_000), 7)
    replay = Replay(planner, synthetic.model(7, 10_000), made_up(*[0.7] * 7, output=16), 10_000)
    replay.run(20, 0)
    assert replay.tokens >= 0.99 * 20 * 10_000


def test_a_synthetic_cost_equals_its_formula() -> None:
    synthetic = SyntheticCost(base=10, token=0.5, knee=0, request=0.25, context=1e-3, draft=2, draft_request=0.5)
    cost = synthetic.model(gamma=7, max_requests=100)
    for requests, context in [(1, 0), (3, 900.0), (20, 5000.0), (100, 60_000.0)]:
        tokens = np.arange(requests, 8 * requests + 1)
        expected = [synthetic.seconds(requests, b, context) for b in tokens]
        np.testing.assert_allclose(cost.seconds(requests, tokens, context), expected, rtol=1e-9)
        assert cost.draft_seconds(requests) == pytest.approx(2e-3 + 0.5e-3 * requests)
    with pytest.raises(ValueError, match="token is 0 or more"):
        SyntheticCost(token=-1)


def test_the_same_seed_replays_the_same_answers():
    drafting = Drafting.of(recording(), None, 1.2, 1.7)
    replays = [Replay(VerifyAll(), curve_cost(3, [1.0] * 9), drafting, 3, seed=seed) for seed in (1, 1, 2)]
    for replay in replays:
        replay.run(100, 5)
    tokens = [replay.tokens for replay in replays]
    assert tokens[0] == tokens[1] != tokens[2]
