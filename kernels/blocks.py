"""Matrix products with the weights as a GGUF file keeps them: 4 or 8 bits each, so that a step reads less memory.

32 neighbours in depth share a scale d, in Q4_1 a minimum m as well, both fp16; a weight is d * q or d * q + m. The
product expands them to exactly the bf16 numbers of the unpacked model: its bits are those of `packed_linear` on them,
for any number of rows and threads. The blocks are the quantised formats of llama.cpp (ggml-common.h); their meaning is
that of the package gguf, whose result is then rounded to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.cpu import native
from outrider.kernels.linear import PANEL, invariant_linear, reference_linear

BLOCK = 32
"""Neighbours in depth that share a scale; as in cpu/csrc/kernels.h."""
KINDS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Bytes of a block, by the names of gguf's types; in the order of cpu/csrc/kernels.h."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [outputs, depth] in blocks, or expanded where there are no compiled kernels.

    kind: index into `KINDS`.
    blocks: bytes in an order that only `block_linear` understands; None without compiled kernels.
    plain: [outputs, depth] bfloat16, kept only where `blocks` is None.
    bias: [outputs] or None; float32 and padded to whole panels beside `blocks`.
    """

    outputs: int
    depth: int
    kind: int
    blocks: torch.Tensor | None
    plain: torch.Tensor | None
    bias: torch.Tensor | None


def pack_blocks(
    raw: torch.Tensor, kind: str, outputs: int, depth: int, bias: torch.Tensor | None = None
) -> BlockWeight:
    """Lay the blocks of a GGUF tensor out for the processor once; the original may then be freed.

    raw: uint8, the tensor's rows one after the other as in the file. kind: a name of `KINDS`. bias: [outputs].

    Raises
    ------
    ValueError
        An unknown kind, a depth that is no multiple of 32, bytes that do not fit the shape, a scale that is not finite.
    """
    rows = _rows_of_blocks(raw, kind, outputs, depth)
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"expected a bias [{outputs}], got {tuple(bias.shape)}")
    index = list(KINDS).index(kind)
    if not raw.is_cpu or not native.available():
        return BlockWeight(outputs, depth, index, None, expand(raw, kind, outputs, depth), bias)
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -outputs % PANEL))
    return BlockWeight(outputs, depth, index, torch.ops.outrider.pack_blocks(rows, index), None, padded)


def quantise_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """The Q8_0 blocks nearest to a weight [outputs, depth]: uint8 [outputs, bytes of a row], as in a GGUF file."""
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scales.float().clamp_min(2**-24)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], -1).flatten(1)


def block_linear(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    """x [..., depth], float32 or bfloat16, times the weight, transposed, plus its bias: [..., outputs] in x's type."""
    if x.shape[-1] != weight.depth:
        raise ValueError(f"x has depth {x.shape[-1]}, the weight {weight.depth}")
    if weight.blocks is None:
        assert weight.plain is not None
        bias = None if weight.bias is None else weight.bias.to(x.dtype)
        return invariant_linear(x, weight.plain.to(x.dtype), bias)
    return torch.ops.outrider.block_linear(x.contiguous(), weight.blocks, weight.kind, weight.bias, weight.outputs)


def expand(raw: torch.Tensor, kind: str, outputs: int, depth: int) -> torch.Tensor:
    """The bfloat16 weight [outputs, depth] of these blocks: what gguf gives in float32, rounded to nearest even."""
    rows = _rows_of_blocks(raw, kind, outputs, depth).view(outputs, depth // BLOCK, KINDS[kind])
    halves = 2 if kind == "Q4_1" else 1
    scales = rows[..., : 2 * halves].contiguous().view(torch.float16).float()
    codes = rows[..., 2 * halves :]
    if kind == "Q8_0":
        numbers = codes.contiguous().view(torch.int8).float()
    else:
        numbers = torch.cat([codes & 15, codes >> 4], dim=-1).float() - (8 if kind == "Q4_0" else 0)
    weight = scales[..., :1] * numbers  # exact: 11 bits times at most 8
    if kind == "Q4_1":
        weight = weight + scales[..., 1:]
    return weight.view(outputs, depth).bfloat16()


def reference_block_linear(
    x: torch.Tensor, raw: torch.Tensor, kind: str, outputs: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What `block_linear(x, pack_blocks(raw, kind, outputs, depth, bias))` means, in float64."""
    return reference_linear(x, expand(raw, kind, outputs, x.shape[-1]), bias)


def _rows_of_blocks(raw: torch.Tensor, kind: str, outputs: int, depth: int) -> torch.Tensor:
    """raw as [outputs, bytes of a row], checked."""
    if kind not in KINDS:
        raise ValueError(f"blocks of kind {kind} are not known, only {', '.join(KINDS)}")
    if depth % BLOCK:
        raise ValueError(f"the depth must be a multiple of {BLOCK}, got {depth}")
    if raw.dtype != torch.uint8 or raw.numel() != outputs * (depth // BLOCK) * KINDS[kind]:
        raise ValueError(
            f"a {kind} weight [{outputs}, {depth}] has {outputs * (depth // BLOCK) * KINDS[kind]} bytes, "
            f"got {raw.numel()} of {raw.dtype}"
        )
    rows = raw.contiguous().view(outputs, -1)
    blocks = rows.view(-1, KINDS[kind])
    scales = blocks[:, : 4 if kind == "Q4_1" else 2].contiguous().view(torch.float16)
    if not scales.isfinite().all():
        raise ValueError(f"a scale of the {kind} weight [{outputs}, {depth}] is not finite")
    return rows
