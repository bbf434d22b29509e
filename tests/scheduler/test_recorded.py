"""Recorded positions: a replay gives what the recorded drafts give, and drafts as the served drafter does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planning import curve_cost

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.lookup_first import LookupFirst
from outrider.scheduler.cost.synthetic import SyntheticCost
from outrider.scheduler.planners.baselines import StaticGamma, VerifyAll
from outrider.scheduler.simulation.recorded import Drafting, Positions, Replay, confidence, to_log_odds

GAMMA, LONGEST = 3, 5


def recording(answers: int = 4, length: int = 60) -> Positions:
    rng = np.random.default_rng(0)
    count = answers * length
    lens = np.where(rng.random(count) < 0.5, LONGEST, 0)
    model, lookup = rng.random((count, GAMMA)), rng.random((count, LONGEST))
    return Positions(
        np.arange(answers + 1) * length,
        np.full(answers, 10),
        to_log_odds(model),
        to_log_odds(lookup),
        rng.integers(0, GAMMA + 1, count).astype(np.int8),
        np.minimum(rng.integers(0, LONGEST + 1, count), lens).astype(np.int8),
        lens.astype(np.int8),
    )


def test_a_recording_is_read_as_it_was_written(tmp_path):
    found = recording()
    found.save(tmp_path / "kept.npz")
    read = Positions.load(tmp_path / "kept.npz")
    assert all(np.array_equal(getattr(found, name), getattr(read, name)) for name in Positions.__slots__)
    (tmp_path / "other.npz").write_text("no recording")
    with pytest.raises(ValueError, match="is not a recording"):
        Positions.load(tmp_path / "other.npz")


def test_confidences_are_kept_closely():
    wanted = np.linspace(0.001, 0.999, 500)
    assert confidence(to_log_odds(wanted)) == pytest.approx(wanted, abs=0.01)


class Recorded(Drafter):
    """Drafts of recorded positions, which are the anchors."""

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
    found = recording()
    drafting = Drafting.of(found, None, 1.2, 1.7)
    lookup = np.where(found.lookup_lens[:, None] > 0, confidence(found.lookup), 0).astype(np.float32)
    served = LookupFirst(
        Recorded(lookup, found.lookup_lens, by_model=False),
        Recorded(confidence(found.model), np.full(len(found.model), GAMMA), by_model=True),
        expected_run_length=1.7,
    )
    rng, place = np.random.default_rng(1), np.arange(len(found.model))
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
    assert np.array_equal(kept, np.where(looked_up, found.lookup_kept, found.model_kept))


def test_a_replay_gives_the_tokens_and_takes_the_time_of_its_steps():
    """Without noise and the host's work every step takes 10 ms; only the planner's real time comes on top."""
    cost = SyntheticCost(base=10.0, token=0.0, request=0.0, draft=0.0, draft_request=0.0).model(LONGEST, 4)
    drafting = Drafting.of(recording(), None, 1.2, 1.7)
    plain = Replay(StaticGamma(0), cost, drafting, 2, noise=0.0, host=(0.0, 0.0)).run(50, 10)
    assert plain == pytest.approx(200.0, rel=0.02)
    replay = Replay(VerifyAll(), cost, drafting, 2, noise=0.0, host=(0.0, 0.0))
    throughput = replay.run(400, 0)
    assert replay.drafted > 0
    assert replay.verified > replay.tokens - 800  # tokens beyond the one of each request and step were verified
    assert throughput > 1.5 * plain
    assert replay.tokens / 400 * 100 == pytest.approx(throughput, rel=0.05)


def test_the_same_seed_replays_the_same_answers():
    drafting = Drafting.of(recording(), None, 1.2, 1.7)
    found = [Replay(VerifyAll(), curve_cost(3, [1.0] * 9), drafting, 3, seed=seed) for seed in (1, 1, 2)]
    for replay in found:
        replay.run(100, 5)
    tokens = [replay.tokens for replay in found]
    assert tokens[0] == tokens[1] != tokens[2]
