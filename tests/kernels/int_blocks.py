"""Integer products of weights in blocks: their definition and bit-exact reference.

Rows are rounded to signed bytes, as in llama.cpp, so that a processor multiplies bytes, and a few rows take the time of
reading the weights. The model is then the file's with 8-bit activations.

A row's block of A neighbours in depth has codes a = x / s, clamped to -127 .. 127 and rounded to the nearest integer,
ties to even, with s = max |x| / 127, both divisions in float32. A block with a NaN or an infinity has the scale NaN,
and makes the row NaN. A is 256 if the weight's kind has superblocks, else 32. Within a block of the weight, with codes
q, all terms are integers:

  - Q4_0, Q5_0, Q8_0, IQ4_NL, MXFP4: t = d * (sum q a), where q is the table's number if the kind has a table.
    GROUPS: t = d * (sum (q - z) a), for each 32 of a group.
  - Q4_1, Q5_1: t = fma(d, sum q a, m * (sum a)).
  - Q2_K, Q4_K, Q5_K: with sub-blocks' scales c and minima n,
    t = fma(d, sum_k c_k (sum q a), -(m * (sum_k n_k (sum a)))).
  - Q3_K, Q6_K, IQ4_XS: t = d * (sum_k c_k (sum q a)), signed q.

An output is fma(s, t, total) over the blocks in order, starting at 0, then plus the bias, all in float32 (integers
become the nearest float32), and finally rounded to the type of x. No step depends on other rows or on the order of a
sum, so all instruction sets and numbers of rows and threads give these bits.
"""

from typing import NamedTuple

import torch

from outrider.kernels.blocks import BLOCK, KINDS, _shared, block_depth, rows_of_blocks

NONLINEAR = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
"""Numbers of the codes of IQ4_NL and IQ4_XS."""
FLOATS_OF_FOUR_BITS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
"""Numbers of the codes of MXFP4, doubled."""


class Unpacked(NamedTuple):
    """The numbers in a weight's blocks of B neighbours in depth.

    codes: [outputs, depth] signed integers. d: [outputs, depth / B] float32. m: the same, zero points of groups; None
    without. scales, minima: of the sub-blocks [outputs, depth / B, sub-blocks] integers; None without.
    """

    codes: torch.Tensor
    d: torch.Tensor
    m: torch.Tensor | None
    scales: torch.Tensor | None
    minima: torch.Tensor | None


def unpack(raw: torch.Tensor, kind: str, outputs: int, depth: int) -> Unpacked:
    """The numbers in these blocks."""
    blocks = rows_of_blocks(raw, kind, outputs, depth).view(outputs, -1, KINDS[kind])
    d, m = _shared(blocks, kind)
    scales = minima = None
    match kind:
        case "Q2_K":
            scales, minima = blocks[..., :16] & 15, blocks[..., :16] >> 4
            codes = _fields(blocks[..., 16:80], 2, 32)
        case "Q3_K":
            scales = _fields(blocks[..., 96:104], 4, 8) + _fields(blocks[..., 104:108], 2, 4) * 16 - 32
            codes = _fields(blocks[..., 32:96], 2, 32) + _fields(blocks[..., :32], 1, 32) * 4 - 4
        case "Q4_K" | "Q5_K":
            scales, minima = _six_bits(blocks[..., 4:16])
            codes = _fields(blocks[..., -128:], 4, 32)
            if kind == "Q5_K":
                codes = codes + _fields(blocks[..., 16:48], 1, 32) * 16
        case "Q6_K":
            scales = blocks[..., 192:208].contiguous().view(torch.int8)
            codes = _fields(blocks[..., :128], 4, 64) + _fields(blocks[..., 128:192], 2, 32) * 16 - 32
        case "IQ4_XS":
            scales = _fields(blocks[..., 4:8], 4, 1) + _fields(blocks[..., 2:4], 2, 1) * 16 - 32
            codes = NONLINEAR[_fields(blocks[..., 8:], 4, 16)]
        case "Q8_0":
            codes = blocks[..., 2:].contiguous().view(torch.int8).int()
        case "Q5_0" | "Q5_1":
            codes = _fields(blocks[..., -16:], 4, 16) + _fields(blocks[..., -20:-16], 1, 1) * 16
            codes = codes - 16 if kind == "Q5_0" else codes
        case _:
            codes = _fields(blocks[..., -block_depth(kind) // 2 :], 4, 16)
            table = {"IQ4_NL": NONLINEAR, "MXFP4": FLOATS_OF_FOUR_BITS}.get(kind)
            codes = codes - 8 if kind == "Q4_0" else codes if table is None else table[codes]
    return Unpacked(
        codes.reshape(outputs, depth), d, m, *(None if part is None else part.int() for part in (scales, minima))
    )


def _fields(x: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Bytes [..., n] as [..., n * 8 / bits] numbers: the lowest bits of `width` bytes first."""
    fields = x.int().unflatten(-1, (-1, 1, width)) >> torch.arange(0, 8, bits, dtype=torch.int32)[:, None]
    return (fields & ((1 << bits) - 1)).flatten(-3)


def _six_bits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and minima [..., 8] in the twelve bytes of a superblock."""
    first, second, both = x.split(4, -1)
    scales = torch.cat([first & 63, both & 15 | first >> 6 << 4], -1)
    return scales, torch.cat([second & 63, both >> 4 | second >> 6 << 4], -1)


class RoundedRows(NamedTuple):
    """codes: [rows, blocks, A] integers. scales: [rows, blocks] float32."""

    codes: torch.Tensor
    scales: torch.Tensor


def rounded_depth(kind: str) -> int:
    """Neighbours in depth of a row that share a scale, for this kind of weight."""
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

    The product is exact in float64; the sum is rounded to odd (Boldo and Melquiond, "Emulation of a FMA and correctly
    rounded sums", 2008), so that the final rounding is right.
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
    """Reference of `block_linear` on `pack_blocks(…, activations="int8")`, bit for bit."""
    depth = x.shape[-1]
    rows, weight = round_rows(x, rounded_depth(kind)), unpack(raw, kind, outputs, depth)
    blocks = rows.scales.shape[-1]
    total = torch.zeros(len(x), outputs)
    for n in range(blocks):
        total = fma(rows.scales[:, n, None], _of_block(rows.codes[:, n], weight, kind, n * depth // blocks), total)
    total = total if bias is None else total + bias.float()
    return total.to(x.dtype)


def _of_block(codes: torch.Tensor, weight: Unpacked, kind: str, start: int) -> torch.Tensor:
    """t of the module's docstring [rows, outputs], for row blocks [rows, A] at `start` in depth."""
    size = codes.shape[1]
    block = start // block_depth(kind)
    q = weight.codes[:, start : start + size]
    d, m = (None if part is None else part[:, block] for part in (weight.d, weight.m))
    if weight.scales is None:
        total = _exact(codes, q)
        if kind.startswith("GROUPS_"):
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
