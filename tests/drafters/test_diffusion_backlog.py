"""Texts that a DiffusionDrafter has not encoded yet: how much a step encodes, and which requests draft meanwhile."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from scenes import GAMMA, LENGTHS, SLOTS, Scene, make_denoiser, pages, text
from tiny_drafters import DIFFUSION, assert_same_draft, batch

from outrider.drafters import encoding
from outrider.drafters.base import Features, Prefilled
from outrider.drafters.diffusion.drafter import DiffusionDrafter

SCENE = Scene(partial(make_denoiser, DIFFUSION), width=0)


def observe_one_each(to: DiffusionDrafter, table: torch.Tensor, texts: torch.Tensor, length: int) -> None:
    """Steps in which every request gets a token and none drafts."""
    for step in range(length):
        slots = table[:, step].long()
        to.observe(Features(None, texts[:, step], torch.full_like(slots, step), slots))


def rows_of_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass."""
    rows: list[int] = []
    run = DiffusionDrafter._pass

    def counted(self: DiffusionDrafter, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(len(x))
        return run(self, x, *rest)

    monkeypatch.setattr(DiffusionDrafter, "_pass", counted)
    return rows


@pytest.mark.parametrize("requests", [1, 24])
def test_a_probe_after_a_thousand_undrafted_steps_is_bounded(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_denoiser(dataclasses.replace(DIFFUSION, max_positions=2048), slots=requests * 1100)
    table = torch.randperm(requests * 1100).int().view(requests, 1100)
    texts = torch.stack([text(row, 1100) for row in range(requests)])
    observe_one_each(made, table, texts, 1000)
    rows = rows_of_passes(monkeypatch)
    bound = max(encoding.BACKLOG, encoding.BACKLOG_EACH * requests)
    asking = batch(table, list(range(requests)), [1000] * requests)
    drafts = [made.propose(asking) for _ in range(-(-requests * 1000 // bound))]
    assert max(rows) <= bound + GAMMA * requests
    assert len(rows) == len(drafts)  # no second pass to catch up
    assert not drafts[0].lens.any()
    assert drafts[0].drafting == requests  # the passes take time
    assert drafts[-1].lens.tolist() == [GAMMA] * requests
    whole = make_denoiser(dataclasses.replace(DIFFUSION, max_positions=2048), slots=requests * 1100)
    for row in range(requests):
        SCENE.observe(whole, table, row, 0, 1000)
    monkeypatch.setattr(encoding, "BACKLOG", 1000 * requests)
    assert_same_draft(whole.propose(asking), drafts[-1])


def test_short_backlogs_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BACKLOG", 32)
    monkeypatch.setattr(encoding, "BACKLOG_EACH", 1)
    made, table = SCENE.observed()
    SCENE.observe(made, table, 3, 0, 40)
    asking = batch(table, [0, 1, 2, 3], [*LENGTHS, 40])
    lens = [made.propose(asking).lens.ne(0).tolist() for _ in range(4)]
    assert lens[0] == [True, False, True, False]  # 9, 30, 1 and 40 tokens wait; 32 of them are encoded
    assert lens[1:] == [[True, True, True, False], [True] * 4, [True] * 4]


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("requests", [1, 24, 56])
def test_on_a_device_a_backlog_is_encoded_in_steps_of_one_size(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(DIFFUSION, max_positions=512)
    slots = 1 + requests * 160
    made, whole = make_denoiser(config, slots=slots), make_denoiser(config, slots=slots)
    whole.on_host = True
    table = 1 + torch.randperm(slots - 1).int().view(requests, -1)
    texts = torch.stack([text(row, 160) for row in range(requests)])
    for drafter in (made, whole):
        observe_one_each(drafter, table, texts, 150)
    rows = rows_of_passes(monkeypatch)
    asking = batch(table, list(range(requests)), [150] * requests)
    room = rows_of_a_step(requests)
    at_most = -(-150 * requests // room) + -(-150 // encoding.MOST)
    drafts = [made.propose(asking) for _ in range(at_most + 1)]
    assert rows == [room + GAMMA * requests] * len(drafts)
    assert not drafts[0].lens.any()
    assert drafts[0].drafting == requests
    ready = torch.stack([draft.lens for draft in drafts])
    assert ready[-1].tolist() == [GAMMA] * requests
    assert (ready.diff(dim=0) >= 0).all()
    assert all(not draft.confidence[draft.lens == 0].any() for draft in drafts)
    monkeypatch.setattr(encoding, "BACKLOG", 150 * requests)
    assert_same_draft(whole.propose(asking), drafts[-1])


def rows_of_a_step(requests: int) -> int:
    return max(min(encoding.ROOM, encoding.MOST * requests), (GAMMA + 1) * requests)


@pytest.mark.usefixtures("device")
def test_on_a_device_a_backlog_does_not_stop_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests commit as much as they can, while one has much to catch up."""
    monkeypatch.setattr(encoding, "ROOM", 8)  # no room beyond committed tokens
    monkeypatch.setattr(encoding, "MOST", 8)
    made, others = make_denoiser(dataclasses.replace(DIFFUSION, max_positions=512)), 7
    table = pages(rows=8, context=200)
    lens = [1] * others + [60]
    for row, length in enumerate(lens):
        SCENE.observe(made, table, row, 0, length)
    for step in range(30):
        lagging = made.propose(batch(table, list(range(8)), lens)).lens.tolist()
        assert lagging[:others] == [GAMMA] * others
        assert (lagging[others] == GAMMA) == (step >= 60 / (GAMMA + 1) - 1)
        for row in range(others):
            SCENE.observe(made, table, row, lens[row], lens[row] + GAMMA + 1)
            lens[row] += GAMMA + 1


@pytest.mark.usefixtures("device")
def test_on_a_device_prompts_are_encoded_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whole prompt, and one after an unencoded prefix, which is encoded first."""
    monkeypatch.setattr(encoding, "BACKLOG", 1000)
    made, whole, table = make_denoiser(DIFFUSION), make_denoiser(DIFFUSION), pages(context=160)
    whole.on_host = True
    rows, lens = torch.tensor([0, 1]), [150, 120]
    for drafter in (made, whole):
        SCENE.observe(drafter, table, 0, 0, 150)
        SCENE.observe(drafter, table, 1, 0, 120)
    made.prefilled(Prefilled(table, rows, torch.tensor(lens), [150, 20], 150))
    assert [int(made.encoded[table[row, :160].long()].sum()) for row in (0, 1)] == [50, 120]
    assert not made.encoded[table[0, 50:].long()].any()
    made.prefilled(Prefilled(table, rows[:1], torch.tensor([150]), [100], 150))
    asking = batch(table, [0, 1], lens, 0.9)
    drafted = made.propose(asking)
    assert drafted.lens.tolist() == [GAMMA] * 2
    assert_same_draft(whole.propose(asking), drafted)


@pytest.mark.usefixtures("device")
def test_on_a_device_padding_goes_to_the_unused_slot() -> None:
    made, table = SCENE.observed()
    for keys, values in made.pools:
        keys.normal_()
        values.normal_()
    before = [pool.clone() for pair in made.pools for pool in pair]
    made.propose(batch(table, [0, 1], [9, 30]))
    theirs = torch.cat([table[0, : 9 + GAMMA], table[1, : 30 + GAMMA], torch.zeros(1)]).long()
    others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, theirs, False)
    for pool, old in zip((pool for pair in made.pools for pool in pair), before, strict=True):
        assert torch.equal(pool[others], old[others])
        assert not torch.equal(pool[0], old[0])
    assert int(made.encoded[1:].sum()) == 39
