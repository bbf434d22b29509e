"""The drafter's training forward: many blocks of several sequences at once, with teacher forcing."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from .. import networks
from ..block.checkpoint import check_target, target_identity
from ..block.model import BlockModel, TrainedModel
from ..chain.drafter import with_shared
from ..eagle.config import EagleConfig
from ..eagle.model import EagleModel
from .batches import Tile, TrainingStep
from .target import TargetModel


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The target's share of the drafter: embedding [V, d] and the head rows of the draft vocabulary [V', d]."""

    embedding: torch.Tensor
    head: torch.Tensor


def frozen_part(model: TrainedModel, target: TargetModel) -> FrozenTarget:
    """Return the target's share of this drafter. An EAGLE-3 head may have its own instead."""
    if not isinstance(model, EagleModel):
        return FrozenTarget(target.embedding, target.head[model.vocab.to(target.device)].contiguous())
    embedding, head = with_shared(model.stored, target.embedding, target.head)
    assert isinstance(embedding, torch.Tensor)
    return FrozenTarget(embedding.to(target.embedding), head.to(target.head).contiguous())


def load_drafter(folder: Path, target: TargetModel, dtype: torch.dtype) -> TrainedModel:
    """Load a folder's drafter; raises CheckpointError where it does not fit the target."""
    if networks.read_config(folder).kind == EagleConfig.kind:
        return EagleModel.load(folder, target.config.num_hidden_layers, target.embedding.shape, dtype=dtype)
    model = networks.load_any(folder, dtype=dtype)
    check_target(model.config, target_identity(target.config, target.embedding))
    return model


def blocks_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], tiles: list[Tile]
) -> torch.Tensor:
    """Return the attention [A, Q, Hq, D] of A blocks over all K keys of their own and the context that they see. q: [A,
    Q, Hq, D]. k, v: [A, K, Hkv, D]. context: keys and values [C, Hkv, D]."""
    out = []
    for tile in tiles:
        here, past = tile.blocks, tile.context
        out.append(tile_attention(q[here], k[here], v[here], context[0][past], context[1][past], tile.hidden))
    return torch.cat(out)


def tile_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return `blocks_attention` of a tile, all its sequences in the same products; keys, values: of its context."""
    many, blocks, length = hidden.shape
    (_, queries, heads, dim), groups = q.shape, k.shape[2]
    per = heads // groups
    shape, rows = (many, groups, blocks, per * queries), blocks * per * queries
    grouped = (q * dim**-0.5).view(many, blocks, queries, groups, per, dim).permute(0, 3, 1, 4, 2, 5)
    past_k, past_v = (x.view(many, length, groups, dim).transpose(1, 2) for x in (keys, values))
    past = (grouped.reshape(many, groups, rows, dim) @ past_k.transpose(2, 3)).view(*shape, length)
    past = past.masked_fill(hidden[:, None, :, None], float("-inf"))
    own_k, own_v = (x.view(many, blocks, -1, groups, dim).permute(0, 3, 1, 2, 4) for x in (k, v))
    block = grouped.reshape(*shape, dim) @ own_k.transpose(3, 4)
    weights = torch.cat([past, block], -1).softmax(-1)
    out = (weights[..., :length].reshape(many, groups, rows, length) @ past_v).view(*shape, dim)
    out = out + weights[..., length:] @ own_v
    out = out.view(many, groups, blocks, per, queries, dim).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(many * blocks, queries, heads, dim)


def hidden_states(model: BlockModel | EagleModel, frozen: FrozenTarget, step: TrainingStep, size: int) -> torch.Tensor:
    """Return hidden states [A, size, d] of the predicted positions of every block."""
    if isinstance(model, EagleModel):
        return chain_states(model, frozen, step, size)
    return parallel_states(model, frozen, step, size)


def parallel_states(model: BlockModel, frozen: FrozenTarget, step: TrainingStep, size: int) -> torch.Tensor:
    """Return `hidden_states` of a block drafter."""
    first = model.config.first_row
    queries = size + first
    context = model.context_kv(step.features.to(model.fc.weight.dtype), step.positions)
    ids = step.anchors.new_full((len(step.anchors), queries), model.config.mask_token_id)
    ids[:, 0] = step.anchors
    positions = step.anchor_positions[:, None] + torch.arange(queries, device=ids.device)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.reshape(-1, queries, *x.shape[1:]) for x in (q, k, v))
        return blocks_attention(q, k, v, context[layer], step.tiles).flatten(0, 1)

    embedded = frozen.embedding[ids.flatten()]
    hidden = model(embedded, positions.flatten(), attend, queries)
    return hidden.view(len(ids), queries, -1)[:, first:]


def chain_states(model: EagleModel, frozen: FrozenTarget, step: TrainingStep, size: int) -> torch.Tensor:
    """Return `hidden_states` of an EAGLE-3 head, unrolled: the training-time test of arXiv 2503.01840, section 3.2.

    Rows before the anchor's are paired with the target's features, as in serving. The row of the k-th token after the
    anchor is paired with the head's output for the row before, and sees that row. Tokens are the answer's.
    """
    fused = model.fuse(step.features)
    # The first row of each sequence has no features. It is hidden, like all rows from the anchor's on.
    context = model.keys_values(frozen.embedding[step.context], fused.roll(1, 0), step.positions)
    tiles = [replace(tile, hidden=F.pad(tile.hidden[..., 1:], (1, 0), value=True)) for tile in step.tiles]
    features = fused[rows_before(step)]
    own_k: list[torch.Tensor] = []
    own_v: list[torch.Tensor] = []
    states = []

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        own_k.append(k)
        own_v.append(v)
        return blocks_attention(q[:, None], torch.stack(own_k, 1), torch.stack(own_v, 1), context, tiles).flatten(0, 1)

    for k in range(size):
        embedded = frozen.embedding[step.tokens[:, k]]
        state, features = model.step(embedded, features, step.anchor_positions + k, attend)
        states.append(state)
    return torch.stack(states, 1)


def rows_before(step: TrainingStep) -> torch.Tensor:
    """Return [A] the context row of the token before each anchor."""
    starts = []
    for tile in step.tiles:
        many, blocks, length = tile.hidden.shape
        starts.append(tile.start + torch.arange(many, device=step.anchors.device).repeat_interleave(blocks) * length)
    return torch.cat(starts) + step.anchor_positions - 1
