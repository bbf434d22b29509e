"""Products of experts' weights with the rows that chose each of them; see `kernels/experts.py`.

A program reads its columns of one expert's weight once for every 16 rows that chose it, 2 * depth bytes a column in
half precision. In a step's few rows most experts have fewer; experts that no row chose are not read.
"""

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 16, 64, 64
"""Rows, columns and depth of one product."""


@triton.jit(do_not_specialize=["outputs", "chosen"])
def products_kernel(
    x, weight, order, indptr, out, outputs, depth, chosen, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (expert, columns): x[p // chosen] W' for every choice p of the expert."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < outputs
    begin, end = tl.load(indptr + expert).to(tl.int32), tl.load(indptr + expert + 1).to(tl.int32)
    cells = weight + (expert.to(tl.int64) * outputs + column) * depth
    for first in range(begin, end, ROWS):
        place = first + tl.arange(0, ROWS)
        there = place < end
        choice = tl.load(order + place, mask=there, other=0)
        rows = x + choice // chosen * x_stride
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, depth, DEPTH):
            d = start + tl.arange(0, DEPTH)
            a = tl.load(rows[:, None] + d[None, :], mask=there[:, None] & (d < depth)[None, :], other=0.0)
            b = tl.load(cells[None, :] + d[:, None], mask=inside[None, :] & (d < depth)[:, None], other=0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        to = out + choice[:, None] * outputs + column[None, :]
        tl.store(to, sums.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def expert_products(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, indptr: torch.Tensor, chosen: int
) -> torch.Tensor:
    experts, outputs, depth = weight.shape
    x, out = x.contiguous(), x.new_empty(len(order), outputs)
    products_kernel[(experts, triton.cdiv(outputs, COLUMNS))](
        x, weight, order, indptr, out, outputs, depth, chosen, x.stride(0), ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
