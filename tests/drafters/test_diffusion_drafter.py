"""DiffusionDrafter: encoding piece by piece is encoding from scratch, and the promises of the drafter contract."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chi_square import p_value
from tiny_drafters import (
    DIFFUSION,
    DIFFUSIONS,
    TINY,
    WIDE_DIFFUSION,
    check_tokens_follow_q,
    make_diffusion,
    make_model,
    make_target,
)

from outrider.drafters import networks
from outrider.drafters.base import Draft, DraftBatch, Features, Prefilled
from outrider.drafters.block import BlockConfig, CheckpointError, load, save_compact, save_plain
from outrider.drafters.diffusion import DiffusionDrafter, DiffusionModel, drafter
from outrider.drafters.diffusion.denoise import SCHEDULES
from outrider.kernels.acceptance import accept
from outrider.kernels.attention import bounded_attention, torch_attention
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.noise import Purpose, gumbel_argmax, streams, uniforms

LENGTHS = (9, 30, 1)
GAMMA = DIFFUSION.gamma


@pytest.fixture(params=sorted(DIFFUSIONS))
def shape(request: pytest.FixtureRequest) -> BlockConfig:
    return DIFFUSIONS[request.param]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flat: FlatBatch, **how: Any) -> torch.Tensor:
    """As on a device without Triton."""
    return (torch_attention if flat.longest is None else bounded_attention)(q, k, v, flat, **how)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters work as on a GPU: what is encoded, the host does not know."""
    made = DiffusionDrafter.__init__

    def make_one(self: DiffusionDrafter, *args: Any, **how: Any) -> None:
        made(self, *args, **how)
        self.on_host, self.compiled = False, None

    monkeypatch.setattr(DiffusionDrafter, "__init__", make_one)
    monkeypatch.setattr(drafter, "flat_attention", attend)


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest) -> str:
    """Where drafters work."""
    if request.param == "device":
        request.getfixturevalue("device")
    return request.param


def make(config: BlockConfig, steps: int = 1, order: str = "left", slots: int = 4096) -> DiffusionDrafter:
    model = make_diffusion(config)
    embedding, head = torch.randn(2, config.vocab_size, config.hidden_size)
    made = DiffusionDrafter(
        model, embedding=embedding, head=0.5 * head, denoising_steps=steps, denoising_order=order
    )  # fmt: skip
    made.allocate(slots)
    return made


def text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(96, (length,), generator=torch.Generator().manual_seed(seed))


def page_table(rows: int = 4, context: int = 48, seed: int = 5) -> torch.Tensor:
    order = 1 + torch.randperm(4095, generator=torch.Generator().manual_seed(seed))  # slot 0 belongs to nobody
    return order[: rows * context].view(rows, context).to(torch.int32)


def observe(to: DiffusionDrafter, table: torch.Tensor, row: int, ids: torch.Tensor, start: int, stop: int) -> None:
    positions = torch.arange(start, stop)
    to.observe(Features(None, ids[start:stop], positions, table[row, start:stop].long()))


def batch(table: torch.Tensor, rows: list[int], lengths: list[int], temperature: float = 0.0) -> DraftBatch:
    generator = torch.Generator().manual_seed(1)
    return DraftBatch(
        anchors=torch.tensor([3 + r for r in rows]),
        seq_lens=torch.tensor(lengths),
        page_table=table,
        rows=torch.tensor(rows),
        temperatures=torch.full((len(rows),), temperature),
        keys=torch.randint(2**62, (len(table), GAMMA), generator=generator)[rows],
    )


def observed(config: BlockConfig, steps: int = 1, order: str = "left") -> tuple[DiffusionDrafter, torch.Tensor]:
    made, table = make(config, steps, order), page_table()
    for row, length in enumerate(LENGTHS):
        observe(made, table, row, text(length, row), 0, length)
    return made, table


def same(one: Draft, other: Draft) -> None:
    assert torch.equal(one.lens, other.lens)
    drafted = one.lens > 0
    assert torch.equal(one.tokens[drafted], other.tokens[drafted])
    torch.testing.assert_close(one.confidence, other.confidence)
    if one.probs is not None or other.probs is not None:
        assert one.probs is not None
        assert other.probs is not None
        torch.testing.assert_close(one.probs, other.probs)


def from_scratch(
    model: DiffusionModel, embedding: torch.Tensor, ids: torch.Tensor, block: torch.Tensor, revealed: torch.Tensor
) -> torch.Tensor:
    """States [gamma, d] of a block behind tokens `ids`, by the plain layers over everything at once under one mask."""
    length = len(ids)
    x = torch.cat([embedding[ids], model.block_inputs(embedding[block][None], revealed[None])[0]])
    positions = torch.arange(length + GAMMA)
    seen = torch.ones(length + GAMMA, length + GAMMA).tril().bool()
    seen[length:, length:] = True

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [x.transpose(0, 1) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True).transpose(0, 1)

    return model(x, positions, attend)[length:]


@pytest.mark.usefixtures("compiled", "place")
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_drafts_are_those_of_the_whole_text_at_once(shape: BlockConfig, steps: int) -> None:
    model = make_diffusion(shape)
    embedding, head = torch.randn(2, shape.vocab_size, shape.hidden_size)
    made = DiffusionDrafter(model, embedding=embedding, head=head, denoising_steps=steps)
    made.allocate(4096)
    table = page_table()
    for row, length in enumerate(LENGTHS):
        observe(made, table, row, text(length, row), 0, length)
    draft = made.propose(batch(table, [0, 1, 2], list(LENGTHS)))
    counts = made.schedule.counts
    for row, length in enumerate(LENGTHS):
        block, done = torch.zeros(GAMMA + 1, dtype=torch.int64), 0
        block[0] = 3 + row
        for count in counts:
            known = torch.arange(GAMMA - 1) < done
            logits = from_scratch(model, embedding, text(length, row), block[:-1], known) @ head[model.vocab].T
            block[1 + done : 1 + done + count] = model.vocab[logits.argmax(-1)][done : done + count]
            done += count
        assert torch.equal(draft.tokens[row], block[1:])


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("steps", [1, 2])
def test_whatever_came_before_drafts_are_those_of_a_fresh_start(shape: BlockConfig, steps: int) -> None:
    """Prompts in chunks, steps with and without drafts, drafts that were not taken, a prefix of another request, slots
    that others had before, and a request that lost its place and comes back in other slots. The fresh one works on the
    host."""
    used, slots = make(shape, steps), page_table().flatten()
    generator = torch.Generator().manual_seed(0)

    def dice(sides: int) -> int:
        return int(torch.randint(sides, (), generator=generator))

    for life in range(3):
        texts = {row: text(44, 10 * life + row) for row in range(3)}
        texts[3] = torch.cat([texts[0][:20], text(24, 10 * life + 3)])
        table = slots[torch.randperm(len(slots), generator=generator)].view(4, -1)  # the same slots, of other requests
        lens = dict.fromkeys(range(3), 0)
        while min(lens.values()) < 40:
            row = dice(len(lens))
            stop = min(40, lens[row] + 1 + dice(6))
            observe(used, table, row, texts[row], lens[row], stop)
            if stop > lens[row] and dice(2):
                used.prefilled(Prefilled(table, torch.tensor([row]), torch.tensor([stop]), [stop - lens[row]], stop))
            lens[row] = stop
            if 3 not in lens and lens[0] > 20:
                table[3, :20] = table[0, :20]
                lens[3] = 20
            if dice(3) == 0:
                asked = [r for r in lens if lens[r]]
                drafting = batch(table, asked, [lens[r] for r in asked], float(dice(2)))
                fresh = make(shape, steps)
                fresh.on_host = True
                for r in asked:
                    observe(fresh, table, r, texts[r], 0, lens[r])
                same(used.propose(drafting), fresh.propose(drafting))


def observe_one_each(to: DiffusionDrafter, table: torch.Tensor, texts: torch.Tensor, length: int) -> None:
    """Steps in which every request gets a token and nobody drafts."""
    for step in range(length):
        slots = table[:, step].long()
        to.observe(Features(None, texts[:, step], torch.full_like(slots, step), slots))


def rows_of_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each pass from now on has."""
    rows: list[int] = []
    run = DiffusionDrafter._pass

    def counted(self: DiffusionDrafter, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(len(x))
        return run(self, x, *rest)

    monkeypatch.setattr(DiffusionDrafter, "_pass", counted)
    return rows


@pytest.mark.parametrize("requests", [1, 24])
def test_after_a_thousand_steps_without_drafts_a_probe_is_bounded(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(dataclasses.replace(DIFFUSION, max_positions=2048), slots=requests * 1100)
    table = torch.randperm(requests * 1100).int().view(requests, 1100)
    texts = torch.stack([text(1100, row) for row in range(requests)])
    observe_one_each(made, table, texts, 1000)
    rows = rows_of_passes(monkeypatch)
    bound = max(drafter.BACKLOG, drafter.BACKLOG_EACH * requests)
    asking = batch(table, list(range(requests)), [1000] * requests)
    drafts = [made.propose(asking) for _ in range(-(-requests * 1000 // bound))]
    assert max(rows) <= bound + GAMMA * requests
    assert len(rows) == len(drafts)  # no second pass to catch up
    assert not drafts[0].lens.any()
    assert drafts[0].asked == requests  # it took its time
    assert drafts[-1].lens.tolist() == [GAMMA] * requests
    whole = make(dataclasses.replace(DIFFUSION, max_positions=2048), slots=requests * 1100)
    for row in range(requests):
        observe(whole, table, row, texts[row], 0, 1000)
    monkeypatch.setattr(drafter, "BACKLOG", 1000 * requests)
    same(whole.propose(asking), drafts[-1])


def test_short_backlogs_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "BACKLOG", 32)
    monkeypatch.setattr(drafter, "BACKLOG_EACH", 1)
    made, table = observed(DIFFUSION)
    observe(made, table, 3, text(40, 3), 0, 40)
    asking = batch(table, [0, 1, 2, 3], [*LENGTHS, 40])
    lens = [made.propose(asking).lens.ne(0).tolist() for _ in range(4)]
    assert lens[0] == [True, False, True, False]  # 9, 30, 1 and 40 tokens wait, 32 of them go
    assert lens[1:] == [[True, True, True, False], [True] * 4, [True] * 4]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("requests", [1, 24, 56])
def test_on_a_device_a_backlog_is_worked_off_in_steps_of_one_size(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(DIFFUSION, max_positions=512)
    slots = 1 + requests * 160
    made, whole = make(config, slots=slots), make(config, slots=slots)
    whole.on_host = True
    table = 1 + torch.randperm(slots - 1).int().view(requests, -1)
    texts = torch.stack([text(160, row) for row in range(requests)])
    for one in (made, whole):
        observe_one_each(one, table, texts, 150)
    rows = rows_of_passes(monkeypatch)
    asking = batch(table, list(range(requests)), [150] * requests)
    room = rows_of_a_step(requests)
    at_most = -(-150 * requests // room) + -(-150 // drafter.MOST)  # the last one's share is not the whole room
    drafts = [made.propose(asking) for _ in range(at_most + 1)]
    assert rows == [room + GAMMA * requests] * len(drafts)
    assert not drafts[0].lens.any()
    assert drafts[0].asked == requests  # it took its time
    ready = torch.stack([draft.lens for draft in drafts])
    assert ready[-1].tolist() == [GAMMA] * requests
    assert (ready.diff(dim=0) >= 0).all()
    assert all(not draft.confidence[draft.lens == 0].any() for draft in drafts)
    monkeypatch.setattr(drafter, "BACKLOG", 150 * requests)
    same(whole.propose(asking), drafts[-1])


def rows_of_a_step(requests: int) -> int:
    return max(min(drafter.ROOM, drafter.MOST * requests), (GAMMA + 1) * requests)


@pytest.mark.usefixtures("device")
def test_on_a_device_those_that_keep_up_draft_whatever_others_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that commit as much as they can, beside one request that has a long way to go."""
    monkeypatch.setattr(drafter, "ROOM", 8)  # for no more than is committed
    monkeypatch.setattr(drafter, "MOST", 8)
    made, others = make(dataclasses.replace(DIFFUSION, max_positions=512)), 7
    table = page_table(rows=8, context=200)
    texts = torch.stack([text(200, row) for row in range(8)])
    lens = [1] * others + [60]
    for row, length in enumerate(lens):
        observe(made, table, row, texts[row], 0, length)
    for step in range(30):
        lagging = made.propose(batch(table, list(range(8)), lens)).lens.tolist()
        assert lagging[:others] == [GAMMA] * others
        assert (lagging[others] == GAMMA) == (step >= 60 / (GAMMA + 1) - 1)  # its share is what nobody else commits
        for row in range(others):
            observe(made, table, row, texts[row], lens[row], lens[row] + GAMMA + 1)
            lens[row] += GAMMA + 1


@pytest.mark.usefixtures("device")
def test_on_a_device_prompts_are_encoded_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whole, and one behind a prefix that nobody has encoded: its new tokens' share goes to the prefix first."""
    monkeypatch.setattr(drafter, "BACKLOG", 1000)
    made, whole, table = make(DIFFUSION), make(DIFFUSION), page_table(context=160)
    whole.on_host = True
    texts = [text(150, 0), text(120, 1)]
    rows, lens = torch.tensor([0, 1]), [150, 120]
    for one in (made, whole):
        observe(one, table, 0, texts[0], 0, 150)
        observe(one, table, 1, texts[1], 0, 120)
    made.prefilled(Prefilled(table, rows, torch.tensor(lens), [150, 20], 150))
    assert [int(made.encoded[table[row, :160].long()].sum()) for row in (0, 1)] == [50, 120]  # short ones first
    assert not made.encoded[table[0, 50:].long()].any()
    made.prefilled(Prefilled(table, rows[:1], torch.tensor([150]), [100], 150))
    asking = batch(table, [0, 1], lens, 0.9)
    drafted = made.propose(asking)
    assert drafted.lens.tolist() == [GAMMA] * 2
    same(whole.propose(asking), drafted)


@pytest.mark.usefixtures("device")
def test_on_a_device_padding_goes_to_the_slot_of_nobody() -> None:
    made, table = observed(DIFFUSION)
    for keys, values in made.pools:
        keys.normal_()
        values.normal_()
    before = [pool.clone() for pair in made.pools for pool in pair]
    made.propose(batch(table, [0, 1], [9, 30]))
    theirs = torch.cat([table[0, : 9 + GAMMA], table[1, : 30 + GAMMA], torch.zeros(1)]).long()
    others = torch.ones(4096, dtype=torch.bool).index_fill_(0, theirs, False)
    for pool, old in zip((pool for pair in made.pools for pool in pair), before, strict=True):
        assert torch.equal(pool[others], old[others])
        assert not torch.equal(pool[0], old[0])
    assert int(made.encoded[1:].sum()) == 39


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("order", SCHEDULES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_equals_singles(shape: BlockConfig, temperature: float, order: str) -> None:
    made, table = observed(shape, 2, order)
    together = made.propose(batch(table, [2, 0, 1], [1, 9, 30], temperature))
    for i, (row, length) in enumerate([(2, 1), (0, 9), (1, 30)]):
        alone = made.propose(batch(table, [row], [length], temperature))
        assert torch.equal(together.tokens[i], alone.tokens[0])
        torch.testing.assert_close(together.confidence[i], alone.confidence[0])
        if temperature:
            assert together.probs is not None
            assert alone.probs is not None
            torch.testing.assert_close(together.probs[i], alone.probs[0])


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("order", SCHEDULES)
def test_draft_honours_the_contract(shape: BlockConfig, order: str) -> None:
    made, table = observed(shape, 2, order)
    draft = made.propose(batch(table, [0, 1], [9, 30], 1.0))
    assert draft.tokens.shape == draft.confidence.shape == (2, GAMMA)
    assert draft.lens.tolist() == [GAMMA] * 2
    assert draft.probs is not None
    assert draft.probs.shape == (2, GAMMA, shape.logit_size)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(2, GAMMA))
    assert ((draft.confidence > 0) & (draft.confidence < 1)).all()
    column = draft.tokens if draft.vocab is None else torch.searchsorted(draft.vocab, draft.tokens)
    assert (draft.probs.gather(2, column[..., None]) > 0).all()
    assert (draft.vocab is None) == (shape.draft_vocab_size is None)
    assert made.propose(batch(table, [0], [9])).probs is None
    assert made.target_layers == ()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_from_left_to_right_no_token_is_seen_before_it_is_drawn(shape: BlockConfig, steps: int) -> None:
    made, table = observed(shape, steps)
    base = batch(table, [0, 1, 2], list(LENGTHS), 6.0)
    seen = made.propose(base)
    for k in range(GAMMA):
        changed = base.keys.clone()
        changed[:, k:] += 5
        other = made.propose(dataclasses.replace(base, keys=changed))
        assert not torch.equal(seen.tokens[:, k], other.tokens[:, k])
        assert torch.equal(seen.confidence[:, : k + 1], other.confidence[:, : k + 1])
        assert seen.probs is not None
        assert other.probs is not None
        assert torch.equal(seen.probs[:, : k + 1], other.probs[:, : k + 1])


@pytest.mark.parametrize("steps", [1, 2])
def test_tokens_follow_q_exactly(steps: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "MOST", 1)  # all the draws are of one request, which a device encodes once for each
    made, table = observed(WIDE_DIFFUSION, steps)
    made.prefilled(Prefilled(table, torch.tensor([0]), torch.tensor([9]), [9], 9))
    check_tokens_follow_q(made, table, positions=(0, 1, 3), draws=2000 if place == "host" else 1000)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("steps", "order"), [(2, "left"), (3, "certain")])
def test_texts_drafted_and_verified_are_the_targets(steps: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests behind one prefix, and a target whose tokens depend on the token before: pairs that come out."""
    n, config = 6_000, dataclasses.replace(WIDE_DIFFUSION, draft_vocab_size=12)
    made = make(config, steps, order, slots=10 + n * GAMMA)
    table = torch.cat([1 + torch.arange(9).repeat(n, 1), 10 + torch.arange(n * GAMMA).view(n, GAMMA)], 1).int()
    observe(made, table, 0, text(9, 0), 0, 9)
    monkeypatch.setattr(drafter, "MOST", 1)
    made.prefilled(Prefilled(table, torch.tensor([0]), torch.tensor([9]), [9], 9))
    each = torch.arange(n)
    draft = made.propose(
        DraftBatch(
            anchors=torch.full((n,), 3),
            seq_lens=torch.full((n,), 9),
            page_table=table,
            rows=each,
            keys=streams(each[:, None].repeat(1, GAMMA), torch.arange(GAMMA).repeat(n, 1), Purpose.DRAFT),
            temperatures=torch.full((n,), 3.0),
        )
    )
    assert draft.vocab is not None
    generator = torch.Generator().manual_seed(8)
    target = torch.zeros(96, 96)
    target[:, draft.vocab] = (2 * torch.randn(96, 12, generator=generator)).softmax(-1)
    before = torch.cat([torch.full((n, 1), 3), draft.tokens], 1)
    lens, out = accept(
        draft.tokens,
        draft.lens,
        torch.arange(n + 1) * (GAMMA + 1),
        uniforms=uniforms(streams(each, each * 0, Purpose.ACCEPT), GAMMA),
        final_keys=streams(each, each * 0, Purpose.FINAL),
        probs=target[before].flatten(0, 1),
        draft_probs=draft.probs,
        vocab=draft.vocab,
    )
    assert lens.unique().tolist() == list(range(1, GAMMA + 2))
    second = out[:, 1].where(lens > 1, gumbel_argmax(target[out[:, 0]], streams(each, each * 0, Purpose.TOKEN)))
    known = draft.vocab.tolist()
    pairs = {(a, b): float(target[3, a] * target[a, b]) for a in known for b in known}
    assert p_value(Counter(zip(out[:, 0].tolist(), second.tolist(), strict=True)), pairs, n) > 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_those_that_are_not_asked_get_no_draft(shape: BlockConfig, temperature: float, place: str) -> None:
    made, table = observed(shape, 2)
    asking = batch(table, [2, 0, 1], [1, 9, 30], temperature)
    some = made.propose(dataclasses.replace(asking, ask=torch.tensor([True, False, True])))
    everyone = made.propose(asking)
    assert (everyone.asked, some.asked) == (3, 2 if place == "host" else 3)  # a device drafts for all, and hides it
    assert some.lens.tolist() == [GAMMA, 0, GAMMA]
    asked = torch.tensor([0, 2])
    assert torch.equal(some.tokens[asked], everyone.tokens[asked])
    torch.testing.assert_close(some.confidence[asked], everyone.confidence[asked])
    assert not some.confidence[1].any()
    nobody = made.propose(dataclasses.replace(asking, ask=torch.zeros(3, dtype=torch.bool)))
    assert (nobody.asked, nobody.lens.tolist()) == (0 if place == "host" else 3, [0, 0, 0])


def test_folders_round_trip_and_refuse_what_does_not_fit(tmp_path: Path, shape: BlockConfig) -> None:
    model, folder = make_diffusion(shape), tmp_path / "compact"
    save_compact(model, folder)
    again = networks.load_any(folder, dtype=torch.float32)
    assert again.config == shape
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, atol=0.02, rtol=0.01)
    save_plain(model, tmp_path / "plain", dtype=torch.float32)
    plain = networks.load_any(tmp_path / "plain", dtype=torch.float32).state_dict()
    assert all(torch.equal(plain[name], value) for name, value in model.state_dict().items())
    embedding = torch.randn(shape.vocab_size, shape.hidden_size)
    target = make_target(_llama(shape), embedding)
    assert DiffusionDrafter.load(target, folder, gamma=3, denoising_steps=3).gamma == 3
    with pytest.raises(CheckpointError, match=r"1\.\.4.*got 5"):
        DiffusionDrafter.load(target, folder, gamma=5)
    with pytest.raises(ValueError, match=r"1\.\.4.*got 5"):
        DiffusionDrafter.load(target, folder, denoising_steps=5)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 8"):
        DiffusionDrafter.load(make_target(_llama(shape, layers=8), embedding), folder)
    with pytest.raises(CheckpointError, match="holds a diffusion drafter, not dspark or dflash"):
        load(folder)
    save_compact(make_model(TINY), tmp_path / "dspark")
    with pytest.raises(CheckpointError, match="holds a dspark drafter, not diffusion"):
        DiffusionDrafter.load(target, tmp_path / "dspark")


def _llama(config: BlockConfig, layers: int = 6) -> SimpleNamespace:
    return SimpleNamespace(
        model_type="llama", hidden_size=config.hidden_size, num_hidden_layers=layers, vocab_size=config.vocab_size
    )
