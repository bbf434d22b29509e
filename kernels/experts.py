"""Mixtures of experts: products of the chosen experts alone, each over the rows that chose it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .fused import silu_mul
from .int8 import Weight, multiply


def run_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Sequence[tuple[Weight, Weight]]
) -> torch.Tensor:
    """Sum of the chosen experts' outputs [N, H] in x's type, in the order of the choice: it depends on no other row.

    x: [N, H]. weights, ids: [N, K], the share and the number of each chosen expert. experts: for each a gated and a
    down product's weight.
    """
    rows, chosen = ids.shape
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(experts)).tolist()
    outputs = x.new_empty(rows * chosen, x.shape[1])
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            places = order[begin : begin + count]
            gate_up, down = experts[expert]
            outputs[places] = multiply(silu_mul(multiply(x[places // chosen], gate_up)), down)
            begin += count
    each = outputs.view(rows, chosen, -1).float() * weights.float()[..., None]
    total = each[:, 0]
    for k in range(1, chosen):
        total = total + each[:, k]
    return total.to(x.dtype)
