"""Mixtures of experts: products of the chosen experts alone, each over the rows that chose it."""

from collections.abc import Callable, Sequence

import torch

from .cuda import native as cuda
from .fused import silu_mul
from .weights import Weight, multiply


def run_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: Sequence[tuple[Weight, Weight]],
    activation: Callable[[torch.Tensor], torch.Tensor] = silu_mul,
) -> torch.Tensor:
    """Return the sum of the chosen experts' outputs [N, H] in x's type, in the order of the choice; rows are
    independent.

    x: [N, H]. weights, ids: [N, K], the share and the number of each chosen expert.
    experts: for each a gated and a down product's weight. activation: [M, 2 * I] to [M, I], between the two.
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
            outputs[places] = multiply(activation(multiply(x[places // chosen], gate_up)), down)
            begin += count
    return _weighed(outputs, weights)


def run_joined_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Do `run_experts` with weights stored together [E, 2 * I, H] and [E, H, I], on any device without waiting for
    it."""
    numbers, order = ids.flatten().sort(stable=True)
    indptr = torch.searchsorted(numbers, torch.arange(len(down) + 1, device=ids.device))
    inner = silu_mul(expert_products(x, gate_up, order, indptr, ids.shape[1]))
    return _weighed(expert_products(inner, down, order, indptr, 1), weights)


def expert_products(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, indptr: torch.Tensor, chosen: int
) -> torch.Tensor:
    """Return [P, O] in x's type: x[p // chosen] times the weight of the expert of choice p.

    x: [P / chosen, D]. weight: [E, O, D].
    order: [P] int64, choices sorted by expert; order[indptr[e]:indptr[e + 1]] belong to expert e. Without Triton a
        weight is copied for each choice.
    """
    if cuda.fits(x, weight):
        return cuda.experts.expert_products(x, weight, order, indptr, chosen)
    place = torch.arange(len(order), device=order.device)
    chosen_weights = weight[torch.searchsorted(indptr, place, right=True) - 1]
    out = x.new_empty(len(order), weight.shape[1])
    out[order] = torch.bmm(chosen_weights, x[order // chosen][:, :, None])[:, :, 0]
    return out


def _weighed(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [N, H] sums of outputs [N * K, H] by their weights [N, K], one after the other."""
    each = outputs.view(*weights.shape, -1).float() * weights.float()[..., None]
    total = each[:, 0]
    for k in range(1, weights.shape[1]):
        total = total + each[:, k]
    return total.to(outputs.dtype)
