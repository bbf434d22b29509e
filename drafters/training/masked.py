"""Masked blocks: training data of a diffusion drafter, and its training forward.

An answer is cut at many anchors at once instead of being truncated at one place, since its context rows never see the
blocks and serve all of them. After an anchor, the masked tokens are predicted, each by the row before it
(`diffusion/model.py`).

Stage I masks each token with probability t, weighing 1/t (masked diffusion; DEER, continuation distillation). Stage II
masks the last R tokens; the masked token nearest to the known ones weighs most (DEER, refinement).
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..diffusion.model import DiffusionModel
from .batches import TrainingStep
from .forward import FrozenTarget, blocks_attention


@dataclass(frozen=True, slots=True)
class MaskedStep:
    """A step of A partly masked blocks; `step.rows` and its labels are of the masked tokens alone. revealed: [A, size -
    1] bool, tokens x_1 .. x_{size - 1} that the blocks see."""

    step: TrainingStep
    revealed: torch.Tensor

    @property
    def anchors(self) -> torch.Tensor:
        return self.step.anchors


def masked_anywhere(blocks: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [blocks, size] bool, tokens masked with each block's own probability t, and their weights 1/t. The t are
    spread evenly over 1/size .. 1: with less most blocks would have no mask, and the rest would weigh very much."""
    place = (torch.randperm(blocks, generator=generator) + torch.rand(blocks, generator=generator)) / blocks
    t = (1 + (size - 1) * place) / size
    masked = torch.rand(blocks, size, generator=generator) < t[:, None]
    return masked, (1 / t)[:, None].expand(-1, size)


def masked_at_the_end(
    blocks: int, size: int, alpha: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [blocks, size] bool, the last R tokens, and weights alpha ** (R - i) of the i-th of them, scaled to sum 1.
    In every other block R is `size`, with which every draft begins, else any number up to it."""
    count = torch.randint(1, size + 1, (blocks,), generator=generator)
    count[::2] = size
    left = torch.arange(size, 0, -1).expand(blocks, -1)  # R - i + 1
    masked = left <= count[:, None]
    weights = alpha ** (left - 1.0) * masked
    return masked, weights / weights.sum(1, keepdim=True)


def mask_blocks(step: TrainingStep, masked: torch.Tensor, weights: torch.Tensor) -> MaskedStep:
    """Return the step with these [A, size] tokens masked, and labels for them alone."""
    labels, size = step.labels, masked.shape[1]
    masked, weights = masked.to(step.rows.device), weights.to(step.rows.device)
    kept = masked.flatten()[step.rows]
    rows = step.rows[kept]
    block = rows // size
    starts = torch.cat([torch.ones_like(block[:1], dtype=torch.bool), block.diff() != 0]).nonzero()[:, 0]
    labels = replace(
        labels,
        token=labels.token[kept],
        top=labels.top[kept],
        probs=labels.probs[kept],
        weight=labels.weight[kept] * weights.flatten()[rows],
        place=labels.place[kept],
        blocks=starts.tolist(),
    )
    return MaskedStep(replace(step, rows=rows, labels=labels), ~masked[:, :-1])


def block_states(
    model: DiffusionModel, frozen: FrozenTarget, step: TrainingStep, ids: torch.Tensor, revealed: torch.Tensor
) -> torch.Tensor:
    """Return normed states [A, size, d] of blocks that follow the step's contexts. ids: [A, size], x_0 .. x_{size - 1}.
    revealed: [A, size - 1] bool, which of x_1 .. x_{size - 1} are seen."""
    blocks, size = ids.shape
    behind = len(step.context)
    positions = step.anchor_positions[:, None] + torch.arange(size, device=ids.device)
    rope = model.rotary.rows(torch.cat([step.positions, positions.flatten()]))
    inputs = model.block_inputs(frozen.embedding[ids], revealed)
    x = torch.cat([frozen.embedding[step.context], inputs.flatten(0, 1)])
    layers = model.draft_layers
    for i, layer in enumerate(layers):
        q, k, v = layer.block_qkv(x, rope)
        out = []
        if i < len(layers) - 1:
            out.append(_context_attention(q[:behind], k[:behind], v[:behind], step))
        else:  # of the context only its keys and values are wanted
            x = x[behind:]
        one, two, three = (y[behind:].view(blocks, size, *y.shape[1:]) for y in (q, k, v))
        out.append(blocks_attention(one, two, three, (k[:behind], v[:behind]), step.tiles).flatten(0, 1))
        x = layer.finish(x, torch.cat(out))
    states: torch.Tensor = model.norm(x)
    return states.view(blocks, size, -1)


def _context_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: TrainingStep) -> torch.Tensor:
    """Return causal attention [C, Hq, D] of every context over itself."""
    out = []
    for tile in {tile.start: tile for tile in step.tiles}.values():  # the last one of a sequence reaches its end
        rows = tile.context
        one, two, three = (y[rows].unflatten(0, (len(tile.hidden), -1)).transpose(1, 2) for y in (q, k, v))
        seen = F.scaled_dot_product_attention(one, two, three, is_causal=True, enable_gqa=True)
        out.append(seen.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)
