"""Integer products of weights in blocks: their definition, and its reference to the last bit.

Rows are rounded to signed bytes, as llama.cpp does, so that a processor multiplies bytes and a few rows take the time
of reading the weights. The model is then the file's with 8-bit activations.

A row's block of A neighbours in depth has codes a = x / s, held within -127 .. 127 and rounded to the nearest integer,
ties to even, with s = max |x| / 127, both divisions in float32. A block that holds a NaN or an infinity has the scale
NaN, and makes the row NaN. A is 256 where the weight's kind has superblocks, else 32. Within a block of the weight,
with codes q, everything is an integer:

- Q4_0, Q5_0, Q8_0, IQ4_NL, MXFP4: t = d * (sum q a), q being the table's number where there is one. GROUPS:
  t = d * (sum (q - z) a), for each 32 of a group.
- Q4_1, Q5_1: t = fma(d, sum q a, m * (sum a)).
- Q2_K, Q4_K, Q5_K: with sub-blocks' scales c and minima n, t = fma(d, sum_k c_k (sum q a), -(m * (sum_k n_k (sum a)))).
- Q3_K, Q6_K, IQ4_XS: t = d * (sum_k c_k (sum q a)), signed q.

An output is fma(s, t, total) over the blocks from the first to the last, from 0, then plus the bias, all in float32
(integers become the nearest float32), and at last rounded to the type of x. No step depends on other rows, and none on
the order of a sum, so all instruction sets and numbers of rows and threads give these bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.kernels.blocks import BLOCK, Unpacked, block_depth, unpack


class RoundedRows(NamedTuple):
    """codes: [rows, blocks, A] integers. scales: [rows, blocks] float32."""

    codes: torch.Tensor
    scales: torch.Tensor


def rounded_depth(kind: str) -> int:
    """Neighbours in depth of a row that share a scale, where the weight is of this kind."""
    return 256 if block_depth(kind) == 256 else BLOCK


def round_rows(x: torch.Tensor, size: int) -> RoundedRows:
    """Rows [rows, depth] as bytes, in blocks of `size`."""
    blocks = x.float().unflatten(-1, (-1, size))
    scales = blocks.abs().amax(-1) / 127
    scales = scales.where(blocks.isfinite().all(-1), torch.nan)
    codes = (blocks / scales[..., None]).clamp(-127, 127).round()
    return RoundedRows(codes.where(scales[..., None] > 0, 0).long(), scales)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32, rounded once.

    In float64 the product is exact. The sum is rounded to odd (Boldo and Melquiond, "Emulation of a FMA and correctly
    rounded sums", 2008), so that rounding it to float32 afterwards is rounding the exact sum.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & error.isfinite() & (bits & 1 == 0), bits + away, bits)
    return odd.view(torch.float64).float()


def reference_int_block_linear(
    x: torch.Tensor, raw: torch.Tensor, kind: str, outputs: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference of `block_linear` on `pack_blocks(raw, kind, outputs, depth, bias, activations="int8")`: its bits."""
    depth = x.shape[-1]
    rows, weight = round_rows(x, rounded_depth(kind)), unpack(raw, kind, outputs, depth)
    blocks = rows.scales.shape[-1]
    total = torch.zeros(len(x), outputs)
    for n in range(blocks):
        total = fma(rows.scales[:, n, None], _of_block(rows.codes[:, n], weight, kind, n * depth // blocks), total)
    total = total if bias is None else total + bias.float()
    return total.to(x.dtype)


def _of_block(codes: torch.Tensor, weight: Unpacked, kind: str, start: int) -> torch.Tensor:
    """t of the module's docstring [rows, outputs], of a row's block [rows, A] that begins at `start` in depth."""
    size = codes.shape[1]
    block = start // block_depth(kind)
    q = weight.codes[:, start : start + size]
    d, m = (None if part is None else part[:, block] for part in (weight.d, weight.m))
    assert d is not None
    if weight.scales is None:
        total = _exact(codes, q)
        if kind.startswith("GROUPS_"):
            assert m is not None
            return d * (total - m.long() * codes.sum(-1, keepdim=True)).float()
        if m is None:
            return d * total.float()
        return fma(d.expand(len(codes), -1), total.float(), m * codes.sum(-1, keepdim=True).float())
    scales = weight.scales[:, block]
    shared = size // scales.shape[1]
    total = _exact(codes, q * scales.repeat_interleave(shared, 1))
    if weight.minima is None or m is None:
        return d * total.float()
    lower = _exact(codes, weight.minima[:, block].repeat_interleave(shared, 1))
    return fma(d.expand(len(codes), -1), total.float(), -(m * lower.float()))


def _exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [rows, n] times b [outputs, n], transposed, of integers."""
    return (a.double() @ b.double().T).long()
