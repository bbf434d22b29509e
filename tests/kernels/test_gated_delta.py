"""Gated delta networks: compiled kernels and torch against Transformers' rule."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from instruction_sets import SETS, before_a_guard, using
from margins import assert_near
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from outrider.kernels import gated_delta
from outrider.kernels.gated_delta import Corrections, DeltaLayer, States

LENS = [3, 9, 1, 300]
SLOTS = torch.tensor([5, 1, 6, 2])
TAPS = 4


class Sizes(NamedTuple):
    key_heads: int
    heads: int
    key: int
    value: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.heads * self.value


SMALL = Sizes(2, 4, 16, 32)
EVERY = [SMALL, Sizes(1, 3, 48, 16), Sizes(2, 2, 32, 112), Sizes(1, 2, 128, 128)]
"""Tiles of one to four vectors in every instruction set."""


class Tokens(NamedTuple):
    inputs: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@pytest.fixture(autouse=True, params=["torch", *SETS.values()])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Plain torch, and each compiled variant that runs here."""
    if request.param == "torch":
        monkeypatch.setattr(gated_delta, "compiled", lambda states: False)
        yield "torch"
        return
    with using(request.param):
        yield request.param


def layer_of(sizes: Sizes) -> DeltaLayer:
    draw = torch.Generator().manual_seed(0)
    shapes = (sizes.channels, TAPS), (sizes.heads,), (sizes.heads,)
    return DeltaLayer.from_checkpoint(*(torch.randn(shape, generator=draw) for shape in shapes), sizes.key_heads)


def tokens(sizes: Sizes, count: int, dtype: torch.dtype = torch.float32) -> Tokens:
    """Tokens in rows that are not adjacent, as joint projections give them."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(count, sizes.channels + 2 * sizes.heads + 7, generator=draw).to(dtype)
    return Tokens(*rows[:, 7:].split([sizes.channels, sizes.heads, sizes.heads], -1))


def states_of(sizes: Sizes, lens: list[int], slots: torch.Tensor = SLOTS) -> States:
    draw = torch.Generator().manual_seed(2)
    windows = torch.randn(len(LENS) + 3, TAPS - 1, sizes.channels, generator=draw).bfloat16().float()
    pool = torch.randn(len(LENS) + 3, sizes.heads, sizes.key, sizes.value, generator=draw)
    return States(windows, pool, slots, torch.tensor([0, *lens]).cumsum(0))


def advance(given: Tokens, layer: DeltaLayer, states: States, *, write: bool) -> tuple[torch.Tensor, Corrections]:
    """Outputs of a layer; windows and states are updated."""
    mixed = gated_delta.convolve(given.inputs, layer, states)
    outputs = gated_delta.gated_delta(mixed, given.a, given.b, layer, states, write=write)
    if write:
        gated_delta.slide(given.inputs, states, states.indptr.diff())
    return outputs


@pytest.mark.parametrize("sizes", EVERY, ids=str)
def test_it_is_the_rule_of_transformers(sizes: Sizes) -> None:
    layer, given, states = layer_of(sizes), tokens(sizes, sum(LENS)), states_of(sizes, LENS)
    windows, pool = states.windows.clone(), states.pool.clone()
    outputs, _ = advance(given, layer, states, write=True)
    group, width = sizes.heads // sizes.key_heads, sizes.key_heads * sizes.key
    for r, (inputs, a, b) in enumerate(zip(*(x.split(LENS) for x in given), strict=True)):
        known, slot = torch.cat([windows[SLOTS[r]], inputs]), SLOTS[r]
        mixed = F.silu(F.conv1d(known.T[None], layer.taps.T[:, None], groups=sizes.channels))[0].T
        queries, keys, values = mixed[None].split([width, width, sizes.heads * sizes.value], -1)
        queries, keys = (x.unflatten(-1, (-1, sizes.key)).repeat_interleave(group, 2) for x in (queries, keys))
        decay = -layer.rates * F.softplus(a + layer.shifts)
        expected, state = torch_recurrent_gated_delta_rule(
            queries, keys, values.unflatten(-1, (-1, sizes.value)), decay[None], b.sigmoid()[None],
            initial_state=pool[slot][None], output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert_near(outputs.split(LENS)[r], expected[0], LENS[r] + sizes.key)
        assert_near(states.pool[slot], state[0], LENS[r] + sizes.key)
        assert torch.equal(states.windows[slot], known[1 - TAPS :])
    others = [slot for slot in range(len(pool)) if slot not in SLOTS]
    assert torch.equal(states.pool[others], pool[others])
    assert torch.equal(states.windows[others], windows[others])


def test_numbers_of_16_bits_are_computed_in_32(arithmetic: str) -> None:
    given, layer = tokens(SMALL, sum(LENS), torch.bfloat16), layer_of(SMALL)
    outputs, _ = advance(given, layer, states := states_of(SMALL, LENS), write=True)
    mixed = gated_delta.convolve(given.inputs, layer, other := states_of(SMALL, LENS))
    wide = mixed.float(), given.a.float(), given.b.float()
    expected, _ = gated_delta.gated_delta(*wide, layer, other, write=True)
    assert outputs.dtype == torch.bfloat16
    assert torch.equal(outputs, expected.bfloat16())
    assert torch.equal(states.pool, other.pool)


def test_large_and_lost_numbers() -> None:
    """Gates are open or closed, and NaN stays within its request."""
    given, layer = tokens(SMALL, 30), layer_of(SMALL)
    given.a[3], given.a[4], given.b[5], given.b[6] = 1e4, -1e4, 1e4, -1e4
    outputs, _ = advance(given, layer, states_of(SMALL, [10, 20], SLOTS[:2]), write=True)
    assert outputs.isfinite().all()
    given.inputs[2] = torch.nan
    lost, _ = advance(given, layer, states_of(SMALL, [10, 20], SLOTS[:2]), write=True)
    assert torch.equal(lost[10:], outputs[10:])
    assert lost[2:10].isnan().all()


@pytest.mark.parametrize("sizes", EVERY, ids=str)
@pytest.mark.parametrize("kept", [LENS, [1, 1, 1, 1], [2, 5, 0, 37]], ids=str)
def test_states_follow_the_tokens_that_stay(kept: list[int], sizes: Sizes) -> None:
    """The bits are as if the dropped tokens had never been there."""
    layer, given, counts = layer_of(sizes), tokens(sizes, sum(LENS)), torch.tensor(kept)
    states, alone = states_of(sizes, LENS), states_of(sizes, kept)
    outputs, made = advance(given, layer, states, write=False)
    assert torch.equal(states.pool, alone.pool)
    gated_delta.replay(made, states, counts)
    gated_delta.slide(given.inputs, states, counts)
    stays = torch.cat([torch.arange(n) + begin for n, begin in zip(kept, states.indptr.tolist(), strict=False)])
    results, _ = advance(Tokens(*(x[stays] for x in given)), layer, alone, write=True)
    assert torch.equal(results, outputs[stays])
    assert torch.equal(states.pool, alone.pool)
    assert torch.equal(states.windows, alone.windows)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_does_not_depend_on_the_batch(threads: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(threads)
    layer, given, states = layer_of(SMALL), tokens(SMALL, sum(LENS), dtype), states_of(SMALL, LENS)
    outputs, _ = advance(given, layer, states, write=True)
    alone = states_of(SMALL, LENS)
    for piece in torch.arange(sum(LENS[:3]), sum(LENS)).split([1, 2, 101, 1, 195]):
        own = States(alone.windows, alone.pool, SLOTS[3:], torch.tensor([0, len(piece)]))
        results, _ = advance(Tokens(*(x[piece] for x in given)), layer, own, write=True)
        assert torch.equal(results, outputs[piece])
    assert torch.equal(alone.pool[SLOTS[3]], states.pool[SLOTS[3]])
    assert torch.equal(alone.windows[SLOTS[3]], states.windows[SLOTS[3]])


@pytest.mark.parametrize("sizes", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_byte_past_a_buffer_is_touched(sizes: Sizes, dtype: torch.dtype) -> None:
    """The last slot and row end at an unreadable page."""
    layer, given, slots = layer_of(sizes), tokens(sizes, 7, dtype), torch.tensor([len(LENS) + 2, 0])

    def run(guarded: bool) -> list[torch.Tensor]:
        def placed(x: torch.Tensor) -> torch.Tensor:
            return before_a_guard(x) if guarded else x.clone()

        plain = states_of(sizes, [2, 5], slots)
        states = States(placed(plain.windows), placed(plain.pool), placed(plain.slots), placed(plain.indptr))
        own = Tokens(*(placed(x) for x in given))
        constant = DeltaLayer(placed(layer.taps), placed(layer.rates), placed(layer.shifts), layer.key_heads)
        outputs, made = advance(own, constant, states, write=False)
        made = Corrections(placed(made.decays), placed(made.keys), placed(made.deltas))
        gated_delta.replay(made, states, placed(torch.tensor([2, 4])))
        gated_delta.slide(own.inputs, states, torch.tensor([2, 4]))
        return [outputs, *advance(own, constant, states, write=True)[:1], states.pool, states.windows]

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([5, 1, 6, 7])}, "slots[3] is 7, outside 0 .. 6"),
        ({"indptr": torch.tensor([0, 3, 12, 13, 312])}, "indptr must rise from 0 to the 313 rows"),
        ({"indptr": torch.tensor([0, 12, 3, 13, 313])}, "indptr must rise from 0 to the 313 rows"),
        ({"indptr": torch.tensor([0, 3, 12, 13, 313]).int()}, "indptr must be dense Long"),
    ],
)
@pytest.mark.parametrize("arithmetic", SETS.values(), indirect=True)
def test_requests_that_contradict_their_rows_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    given, layer, states = tokens(SMALL, sum(LENS)), layer_of(SMALL), states_of(SMALL, LENS)
    mixed, made = given.inputs.contiguous(), advance(given, layer, states, write=False)[1]
    wrong, counts = States(**({n: getattr(states, n) for n in States.__slots__} | change)), torch.tensor(LENS)
    for call in (
        lambda: gated_delta.convolve(mixed, layer, wrong),
        lambda: gated_delta.gated_delta(mixed, given.a, given.b, layer, wrong, write=True),
        lambda: gated_delta.replay(made, wrong, counts),
        lambda: gated_delta.slide(mixed, wrong, counts),
    ):
        with pytest.raises(RuntimeError, match=message.replace("[", r"\[").replace("]", r"\]")):
            call()
    with pytest.raises(RuntimeError, match="request 0 has fewer rows than 4"):
        gated_delta.replay(made, states, torch.tensor([4, 1, 1, 1]))
    with pytest.raises(RuntimeError, match="request 2 has fewer rows than 2"):
        gated_delta.slide(mixed, states, torch.tensor([0, 1, 2, 1]))
