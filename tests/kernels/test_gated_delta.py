"""Gated delta networks: Transformers' rule, one request at a time, is the reference."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from outrider.kernels import gated_delta
from outrider.kernels.gated_delta import Corrections

KEY_HEADS, HEADS, KEY, VALUE, CHANNELS, TAPS = 2, 4, 16, 32, 48, 4
LENS = [3, 9, 1, 300]


class Tokens(NamedTuple):
    """Those of one layer, of one request after the other."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    inputs: torch.Tensor


class Layer(NamedTuple):
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    weight: torch.Tensor


@pytest.fixture(scope="module")
def layer() -> Layer:
    draw = torch.Generator().manual_seed(0)
    return Layer(*(torch.randn(shape, generator=draw) for shape in ((HEADS,), (HEADS,), (CHANNELS, TAPS))))


def tokens(count: int, seed: int = 1) -> Tokens:
    draw = torch.Generator().manual_seed(seed)
    shapes = (KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,), (CHANNELS,)
    return Tokens(*(torch.randn((count, *shape), generator=draw) for shape in shapes))


def states(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of more slots than requests, and the requests' windows."""
    draw = torch.Generator().manual_seed(seed)
    pool = torch.randn(len(LENS) + 3, HEADS, VALUE, KEY, generator=draw)
    return pool, torch.randn(len(LENS), CHANNELS, TAPS - 1, generator=draw)


SLOTS = torch.tensor([5, 1, 6, 2])


def indptr(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0)


def advance(
    given: Tokens, layer: Layer, pool: torch.Tensor, slots: torch.Tensor, lens: list[int], *, write: bool = True
) -> tuple[torch.Tensor, Corrections]:
    gates = gated_delta.gates(given.a, given.b, layer.a_log, layer.dt_bias)
    return gated_delta.gated_delta(*given[:3], gates, pool, slots, indptr(lens), write=write)


def test_it_is_the_rule_of_transformers(layer: Layer) -> None:
    given, (pool, _) = tokens(sum(LENS)), states()
    before = pool.clone()
    outputs, _ = advance(given, layer, pool, SLOTS, LENS)
    ends = indptr(LENS).tolist()
    for begin, end, slot in zip(ends, ends[1:], SLOTS, strict=False):
        queries, keys, values, a, b, _ = (x[None, begin:end] for x in given)
        decay = -layer.a_log.exp() * F.softplus(a + layer.dt_bias)
        expected, state = torch_recurrent_gated_delta_rule(
            queries.repeat_interleave(2, 2), keys.repeat_interleave(2, 2), values, decay, b.sigmoid(),
            initial_state=before[slot].mT[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(outputs[begin:end], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pool[slot], state[0].mT, atol=1e-5, rtol=1e-5)
    others = [slot for slot in range(len(pool)) if slot not in SLOTS]
    assert torch.equal(pool[others], before[others])


def test_the_convolution_is_torchs(layer: Layer) -> None:
    inputs, windows = tokens(sum(LENS)).inputs, states()[1]
    found = gated_delta.convolve(inputs, layer.weight, windows, indptr(LENS))
    for window, rows, out in zip(windows, inputs.split(LENS), found.split(LENS), strict=True):
        known = torch.cat([window, rows.T], -1)
        expected = F.silu(F.conv1d(known[None], layer.weight[:, None], groups=CHANNELS))[0].T
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("kept", [LENS, [1, 1, 1, 1], [2, 5, 1, 37]])
def test_states_follow_the_tokens_that_stay(kept: list[int], layer: Layer) -> None:
    """The bits are those where the others were never there."""
    given, (pool, windows) = tokens(sum(LENS)), states()
    alone, counts = pool.clone(), torch.tensor(kept)
    before = pool.clone()
    _, made = advance(given, layer, pool, SLOTS, LENS, write=False)
    assert torch.equal(pool, before)
    gated_delta.replay(pool, SLOTS, made, indptr(LENS), counts)
    stays = torch.cat([torch.arange(n) + begin for n, begin in zip(kept, indptr(LENS).tolist(), strict=False)])
    left = Tokens(*(x[stays] for x in given))
    advance(left, layer, alone, SLOTS, kept)
    assert torch.equal(pool, alone)
    slid = gated_delta.slide(windows, given.inputs, indptr(LENS), counts)
    assert torch.equal(slid, gated_delta.slide(windows, left.inputs, indptr(kept), counts))
    known = torch.cat([windows[3], left.inputs[-kept[3] :].T], -1)
    assert torch.equal(slid[3], known[:, 1 - TAPS :])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_a_token_does_not_depend_on_the_batch(threads: int, layer: Layer) -> None:
    """Alone, and with its request cut in two, it has the same bits."""
    torch.set_num_threads(threads)
    given, (pool, windows) = tokens(sum(LENS)), states()
    alone = pool.clone()
    outputs, _ = advance(given, layer, pool, SLOTS, LENS)
    mixed = gated_delta.convolve(given.inputs, layer.weight, windows, indptr(LENS))
    begin, cut = sum(LENS[:3]), 101
    window, own = windows[3:], Tokens(*(x[begin:] for x in given))
    for part in (slice(0, cut), slice(cut, None)):
        piece = Tokens(*(x[part] for x in own))
        count = [len(piece.a)]
        found, _ = advance(piece, layer, alone, SLOTS[3:], count)
        assert torch.equal(found, outputs[begin:][part])
        assert torch.equal(gated_delta.convolve(piece.inputs, layer.weight, window, indptr(count)), mixed[begin:][part])
        window = gated_delta.slide(window, piece.inputs, indptr(count), torch.tensor(count))
    assert torch.equal(alone[SLOTS[3]], pool[SLOTS[3]])
