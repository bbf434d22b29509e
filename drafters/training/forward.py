"""The drafter's training forward: many blocks of several sequences at once, with teacher forcing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..block.model import BlockModel
from .batches import Step, Tile


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The target's share of the drafter: embedding [V, d] and the head rows of the draft vocabulary [V', d]."""

    embedding: torch.Tensor
    head: torch.Tensor


def tile_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], tile: Tile
) -> torch.Tensor:
    """Attention of B blocks over their own keys and their context (bidirectional inside a block).

    q: [B, Q, Hq, D]; k, v: [B, Q, Hkv, D]; context keys and values: [length, Hkv, D]. Returns [B, Q, Hq, D].
    """
    blocks, queries, heads, dim = q.shape
    groups = k.shape[2]
    per = heads // groups
    grouped = (q * dim**-0.5).view(blocks, queries, groups, per, dim).permute(2, 0, 3, 1, 4)
    flat = grouped.reshape(groups, blocks * per * queries, dim)
    past_k, past_v = (x.transpose(0, 1) for x in context)
    past = (flat @ past_k.transpose(1, 2)).view(groups, blocks, per * queries, tile.length)
    past = past.masked_fill(tile.hidden[None, :, None], float("-inf"))
    own = grouped.reshape(groups, blocks, per * queries, dim) @ k.permute(2, 0, 3, 1)
    weights = torch.cat([past, own], -1).softmax(-1)
    past_weights = weights[..., : tile.length].reshape(groups, blocks * per * queries, tile.length)
    out = (past_weights @ past_v).view(groups, blocks, per * queries, dim)
    out = out + weights[..., tile.length :] @ v.permute(2, 0, 1, 3)
    return out.view(groups, blocks, per, queries, dim).permute(1, 3, 0, 2, 4).reshape(blocks, queries, heads, dim)


def hidden_states(model: BlockModel, frozen: FrozenTarget, step: Step, size: int) -> torch.Tensor:
    """Hidden states [A, size, d] of the predicted positions of every block."""
    first = model.config.first_row
    queries = size + first
    context = model.context_kv(step.features.to(model.fc.weight.dtype), step.positions)
    ids = step.anchors.new_full((len(step.anchors), queries), model.config.mask_token_id)
    ids[:, 0] = step.anchors
    positions = step.anchor_positions[:, None] + torch.arange(queries, device=ids.device)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.reshape(-1, queries, *x.shape[1:]) for x in (q, k, v))
        out = []
        for tile in step.tiles:
            rows, past = slice(tile.first, tile.last), slice(tile.start, tile.start + tile.length)
            keys, values = context[layer]
            out.append(tile_attention(q[rows], k[rows], v[rows], (keys[past], values[past]), tile))
        return torch.cat(out).flatten(0, 1)

    embedded = frozen.embedding[ids.flatten()]
    hidden = model(embedded, positions.flatten(), attend)
    return hidden.view(len(ids), queries, -1)[:, first:]
