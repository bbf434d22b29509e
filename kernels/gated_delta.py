"""Gated delta networks (arXiv:2412.06464) over the tokens of several requests, laid end to end, on a CPU.

A layer keeps of a request its window, the last inputs of a short convolution, and a state per head. Every token lets
the state decay and then corrects it: S becomes g S + b k (v - g k S)ᵀ. All is computed in float32, by the compiled
kernels or, without them, by torch. A token's result depends on its own request's tokens alone.

For tokens that may be rejected, `gated_delta` leaves the states unchanged and returns the corrections; `replay` writes
those of accepted tokens, with the same operations and so the same bits.
"""

from dataclasses import dataclass
from typing import Self

import torch

from .cpu import native
from .fused import silu_mul
from .pointwise import sigmoid, softplus

LANES = 16
"""Numbers of the widest vector."""


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The constant part of a layer of H heads, Hk of them with queries and keys of their own; all float32.

    taps: [W, C], weights of the convolution, the last ones for the token itself. rates, shifts: [H], of decays.
    """

    taps: torch.Tensor
    rates: torch.Tensor
    shifts: torch.Tensor
    key_heads: int

    @classmethod
    def from_checkpoint(cls, weight: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, key_heads: int) -> Self:
        """Create a layer from a checkpoint's weight [C, W], a_log [H] and dt_bias [H]."""
        return cls(weight.float().T.contiguous(), a_log.float().exp(), dt_bias.float(), key_heads)


@dataclass(frozen=True, slots=True)
class States:
    """States of S slots, and the slots of R requests: slots [R], with tokens indptr[r]:indptr[r + 1].

    windows: [S, W - 1, C] float32, inputs before the tokens, the oldest first. pool: [S, H, K, V] float32.
    slots, indptr: int64; indptr has R + 1 entries.
    """

    windows: torch.Tensor
    pool: torch.Tensor
    slots: torch.Tensor
    indptr: torch.Tensor


@dataclass(frozen=True, slots=True)
class Corrections:
    """The updates of B tokens to the states of H heads, float32: S becomes decay S + key deltaᵀ. decays: [B, H]. keys:
    [B, Hk, K]. deltas: [B, H, V]."""

    decays: torch.Tensor
    keys: torch.Tensor
    deltas: torch.Tensor


def compiled(states: States) -> bool:
    """Return True if the compiled kernels support these states: `LANES` divides their sizes."""
    sizes = states.windows.shape[2], *states.pool.shape[2:]
    return all(size % LANES == 0 for size in sizes) and native.fits(states.windows, states.pool)


def convolve(inputs: torch.Tensor, layer: DeltaLayer, states: States) -> torch.Tensor:
    """Return the causal convolution of each channel, then SiLU: [B, C] in the type of inputs [B, C]."""
    if compiled(states):
        return torch.ops.outrider.convolve(inputs, layer.taps, states.windows, states.slots, states.indptr)
    taps, indptr = len(layer.taps), states.indptr
    request = torch.arange(len(states.slots)).repeat_interleave(indptr.diff())
    places = torch.arange(len(inputs))[:, None] + torch.arange(1 - taps, 1)
    rows = _rows(places - indptr[request, None], request, indptr, taps)
    known = _known(states, inputs)
    total = known[rows[:, 0]] * layer.taps[0]
    for tap in range(1, taps):
        total += known[rows[:, tap]] * layer.taps[tap]
    return silu_mul(torch.cat([total, torch.ones_like(total)], -1)).to(inputs.dtype)


def slide(inputs: torch.Tensor, states: States, counts: torch.Tensor) -> None:
    """Move the windows past the first counts [R] tokens of each request."""
    if compiled(states):
        torch.ops.outrider.slide(states.windows, states.slots, inputs, states.indptr, counts)
        return
    taps = states.windows.shape[1] + 1
    steps = counts[:, None] + torch.arange(1 - taps, 0)
    rows = _rows(steps, torch.arange(len(states.slots)), states.indptr, taps)
    states.windows[states.slots] = _known(states, inputs)[rows]


def _known(states: States, inputs: torch.Tensor) -> torch.Tensor:
    """Return [R * (W - 1) + B, C]: the windows' inputs, then the tokens' inputs."""
    return torch.cat([states.windows[states.slots].flatten(0, 1), inputs.float()])


def _rows(steps: torch.Tensor, request: torch.Tensor, indptr: torch.Tensor, taps: int) -> torch.Tensor:
    """Return rows of `_known` for steps [N, M] of the requests [N]; negative steps lie in the window."""
    kept, begin = taps - 1, request[:, None] * (taps - 1)
    in_window = begin + kept + steps
    return torch.where(steps < 0, in_window, (len(indptr) - 1) * kept + indptr[request, None] + steps)


def gated_delta(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layer: DeltaLayer, states: States, *, write: bool
) -> tuple[torch.Tensor, Corrections]:
    """Return outputs [B, H, V] of the tokens in the type of mixed, and their corrections.

    mixed: [B, C], queries and keys [Hk, K] each, not yet normalised, and values [H, V] side by side.
    a, b: [B, H]; decays are exp(-rates softplus(a + shifts)), strengths of corrections sigmoid(b).
    write: advance the states past the last tokens; else they stay.
    """
    if compiled(states):
        arrays = layer.rates, layer.shifts, states.pool, states.slots, states.indptr
        outputs, *made = torch.ops.outrider.gated_delta(mixed, a, b, *arrays, layer.key_heads, write)
        return outputs, Corrections(*made)
    heads, key_dim, value_dim = states.pool.shape[1:]
    decays, strengths = torch.exp(-layer.rates * softplus(a.float() + layer.shifts)), sigmoid(b.float())
    width, group = layer.key_heads * key_dim, heads // layer.key_heads
    q, k, values = mixed.float().split([width, width, heads * value_dim], -1)
    queries, keys = (_normalised(x.unflatten(-1, (layer.key_heads, key_dim))) for x in (q, k))
    made = Corrections(decays, keys, torch.empty(len(mixed), heads, value_dim))
    values, queries = values.view(made.deltas.shape), (queries * key_dim**-0.5).repeat_interleave(group, 1)
    outputs, product = torch.empty_like(made.deltas), torch.empty(states.pool.shape[1:])
    ends = states.indptr.tolist()
    for slot, begin, end in zip(states.slots.tolist(), ends, ends[1:], strict=False):
        state = states.pool[slot] if write else states.pool[slot].clone()
        for at in range(begin, end):
            key = keys[at].repeat_interleave(group, 0)[:, :, None]
            state *= decays[at, :, None, None]
            known = torch.mul(state, key, out=product).sum(-2)
            made.deltas[at] = (values[at] - known) * strengths[at, :, None]
            state += torch.mul(key, made.deltas[at, :, None], out=product)
            outputs[at] = torch.mul(state, queries[at, :, :, None], out=product).sum(-2)
    return outputs.to(mixed.dtype), made


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] with each row scaled to length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def replay(made: Corrections, states: States, counts: torch.Tensor) -> None:
    """Write the corrections of the first counts [R] tokens of each request to its state."""
    if compiled(states):
        arrays = made.decays, made.keys, made.deltas, states.indptr, counts
        torch.ops.outrider.replay_delta(states.pool, states.slots, *arrays)
        return
    product, group = torch.empty(states.pool.shape[1:]), states.pool.shape[1] // made.keys.shape[1]
    for slot, begin, count in zip(states.slots.tolist(), states.indptr.tolist(), counts.tolist(), strict=False):
        state = states.pool[slot]
        for at in range(begin, begin + count):
            key = made.keys[at].repeat_interleave(group, 0)[:, :, None]
            state *= made.decays[at, :, None, None]
            state += torch.mul(key, made.deltas[at, :, None], out=product)
