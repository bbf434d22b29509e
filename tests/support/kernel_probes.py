"""Kernels that return intermediate results."""

import torch
import triton
import triton.language as tl

from outrider.kernels.cuda.noise import BITS, exponential
from outrider.kernels.cuda.rules import Rows, heat, kept, weight

BLOCK = 1024


@triton.jit
def noise_kernel(keys, out, width, BLOCK: tl.constexpr):
    row, token = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = exponential(tl.load(keys + row), token.to(tl.int64))
    tl.store(out + row.to(tl.int64) * width + token, noise, mask=token < width)


@triton.jit
def probability_kernel(logits, temperatures, most, norm, cut, last, out, width, BLOCK: tl.constexpr):
    row, token = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature, _ = heat(temperatures, row)
    logit = tl.load(logits + row.to(tl.int64) * width + token, mask=token < width, other=0.0).to(tl.float32)
    w = kept(weight(logit, tl.load(most + row), temperature), token, tl.load(cut + row), tl.load(last + row))
    tl.store(out + row.to(tl.int64) * width + token, w / tl.load(norm + row), mask=token < width)


def exponentials(keys: torch.Tensor, width: int) -> torch.Tensor:
    """[N, width] float64, noise of tokens 0 .. width - 1 for keys [N]: `noise.torch_exponentials`."""
    out = torch.empty((len(keys), width), dtype=torch.float64, device=keys.device)
    noise_kernel[(len(keys), triton.cdiv(width, BLOCK))](keys, out, width, BLOCK=BLOCK, **BITS)
    return out


def probabilities(logits: torch.Tensor, temperatures: torch.Tensor, rows: Rows) -> torch.Tensor:
    """[T, V] float32, the distribution in the numbers of each row: `sampling.target_probs` except greedy rows."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    numbers = rows.most, rows.norm, rows.cut, rows.last
    grid = len(logits), triton.cdiv(logits.shape[1], BLOCK)
    probability_kernel[grid](logits.contiguous(), temperatures, *numbers, out, logits.shape[1], BLOCK=BLOCK)
    return out
