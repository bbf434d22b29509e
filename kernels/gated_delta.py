"""Gated delta networks (arXiv:2412.06464) over the tokens of several requests, laid end to end; in torch, on a CPU.

A layer keeps two things of a request: the last inputs of a short convolution, its window, and a state of each head,
which every token lets decay and then corrects: S becomes g S + (v - g S k) b kᵀ. All is computed in float32. What a
token gives depends on its own request's tokens alone.

Tokens that may be taken back do not write: `gated_delta` leaves the states as they were and returns the corrections,
and `replay` writes those of the tokens that stay, with the same operations and so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .fused import silu_mul

ROWS, LANES = 256, 16
"""Tokens whose gates are computed at once, and those that they are made multiples of: torch rounds exponentials at the
end of an array, and where it is divided among threads, in another way."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """The writing of B tokens to the states of H heads, float32: S becomes decay S + delta keyᵀ.

    decays: [B, H]. keys: [B, H, K]. deltas: [B, H, V].
    """

    decays: torch.Tensor
    keys: torch.Tensor
    deltas: torch.Tensor


def convolve(inputs: torch.Tensor, weight: torch.Tensor, windows: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Causal convolution of each channel, then SiLU: [B, C] in the type of inputs [B, C].

    weight: [C, W], the last column for the token itself. windows: [R, C, W - 1], inputs before the first ones here, the
    oldest first. indptr: [R + 1], where each request's tokens begin and the last one's end.
    """
    requests, taps = len(windows), weight.shape[1]
    lens = indptr.diff()
    request = torch.arange(requests).repeat_interleave(lens)
    places = torch.arange(len(inputs))[:, None] + torch.arange(1 - taps, 1)
    rows = _rows(places - indptr[request, None], request, indptr, taps)
    known = _known(windows, inputs)
    total = known[rows[:, 0]].float() * weight[:, 0].float()
    for tap in range(1, taps):
        total += known[rows[:, tap]].float() * weight[:, tap].float()
    return silu_mul(torch.cat([total, torch.ones_like(total)], -1)).to(inputs.dtype)


def slide(windows: torch.Tensor, inputs: torch.Tensor, indptr: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The windows [R, C, W - 1] after the first counts [R] tokens of each request."""
    requests, taps = len(windows), windows.shape[2] + 1
    rows = _rows(counts[:, None] + torch.arange(1 - taps, 0), torch.arange(requests), indptr, taps)
    return _known(windows, inputs)[rows].transpose(1, 2)


def _known(windows: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """[R * (W - 1) + B, C]: the windows' inputs, then those of the tokens."""
    return torch.cat([windows.transpose(1, 2).flatten(0, 1), inputs.to(windows.dtype)])


def _rows(steps: torch.Tensor, request: torch.Tensor, indptr: torch.Tensor, taps: int) -> torch.Tensor:
    """Rows of `_known` for steps [N, M] of the requests [N]; those before 0 lie in the window."""
    kept, begin = taps - 1, request[:, None] * (taps - 1)
    in_window = begin + kept + steps
    return torch.where(steps < 0, in_window, (len(indptr) - 1) * kept + indptr[request, None] + steps)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays exp(-exp(a_log) softplus(a + dt_bias)) and strengths sigmoid(b) of a correction, [B, H] float32 each.

    a, b: [B, H]. a_log, dt_bias: [H].
    """
    rate, shift = a_log.float().exp(), dt_bias.float()
    return _rowwise(lambda x: torch.exp(-rate * F.softplus(x + shift)), a), _rowwise(torch.sigmoid, b)


def _rowwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The function of each row of x [B, H], in float32, which depends on no other row."""
    padded = F.pad(x.float(), (0, 0, 0, -len(x) % LANES))
    return torch.cat([function(rows) for rows in padded.split(ROWS)])[: len(x)]


def normalised(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] in float32, each row of length one."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    pool: torch.Tensor,
    slots: torch.Tensor,
    indptr: torch.Tensor,
    *,
    write: bool,
) -> tuple[torch.Tensor, Corrections]:
    """Outputs [B, H, V] float32 of the tokens, and what they correct.

    queries, keys: [B, Hk, K], Hk a divisor of H, not yet normalised. values: [B, H, V]. gates: see `gates`.
    pool: [S, H, V, K] float32, states; slots: [R], those of the requests. indptr: [R + 1], see `convolve`.
    write: the states become those after the last tokens; else they stay.
    """
    decays, strengths = gates
    group = values.shape[1] // keys.shape[1]
    queries = (normalised(queries) * keys.shape[2] ** -0.5).repeat_interleave(group, 1)
    keys = normalised(keys).repeat_interleave(group, 1)
    values = values.float()
    outputs = torch.empty(values.shape)
    deltas, product = torch.empty_like(outputs), torch.empty(pool.shape[1:])
    ends = indptr.tolist()
    for slot, begin, end in zip(slots.tolist(), ends, ends[1:], strict=False):
        state = pool[slot] if write else pool[slot].clone()
        for at in range(begin, end):
            key = keys[at, :, None]
            state *= decays[at, :, None, None]
            known = torch.mul(state, key, out=product).sum(-1)
            deltas[at] = (values[at] - known) * strengths[at, :, None]
            state += torch.mul(deltas[at, :, :, None], key, out=product)
            outputs[at] = torch.mul(state, queries[at, :, None], out=product).sum(-1)
    return outputs, Corrections(decays, keys, deltas)


def replay(
    pool: torch.Tensor, slots: torch.Tensor, made: Corrections, indptr: torch.Tensor, counts: torch.Tensor
) -> None:
    """Write the corrections of the first counts [R] tokens of each request to its state."""
    product = torch.empty(pool.shape[1:])
    for slot, begin, count in zip(slots.tolist(), indptr.tolist(), counts.tolist(), strict=False):
        state = pool[slot]
        for at in range(begin, begin + count):
            state *= made.decays[at, :, None, None]
            state += torch.mul(made.deltas[at, :, :, None], made.keys[at, :, None], out=product)
