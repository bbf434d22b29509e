"""The heads with which DFlash 2 and LiLiCorr score paths through the likeliest tokens of each position of a block.
Parameters are named as the published tensors, which SGLang reads too."""

import torch
import torch.nn.functional as F
from torch import nn

from outrider.kernels.sampling import likeliest

from ..base import Rows
from .choosing import CodebookChoosing, LatticeChoosing
from .config import BlockConfig

FEATURES = 5
"""Features of a candidate: its log probability, its probability, its log probability less the first's, its rank, and
whether it is first."""
START = 0.3
"""Standard deviation of the predecessors' codes before training. Successors' codes start at 0, so scores equal the
logits."""


class CodebookSelector(nn.Module):
    """DFlash 2's selector: a token's logit plus the product of both tokens' codes with a projection of the hidden
    state."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        assert isinstance(config.choosing, CodebookChoosing)
        self.candidates, rank = config.choosing.candidates, config.choosing.rank
        self.predecessor_codebook = nn.Parameter(torch.randn(config.vocab_size, rank) * START)
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(
        self, logits: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return candidates [R, G, K] int64, the likeliest first, and scores [R, G, K, K] float32.

        A row of scores belongs to a candidate of the position before, a column to one of this position. At the first
        position all rows belong to the anchor.
        logits: [R, G, V]. hidden: [R, G, d]. anchors: [R] int64.
        """
        logits_of_ids, ids = likeliest(logits, self.candidates)
        return ids, self.scores(logits_of_ids, ids, hidden, anchors)

    def scores(self, own: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return the scores of `forward` for candidates [R, G, K] with logits `own` [R, G, K]."""
        before = torch.cat([anchors[:, None, None].expand(-1, 1, self.candidates), ids[:, :-1]], 1)
        codes = self.predecessor_codebook[before] * self.hidden_projection(hidden)[:, :, None]
        return own[:, :, None] + (codes @ self.successor_codebook[ids].mT).float()


class LatticeSelector(nn.Module):
    """LiLiCorr's head: attention over all candidates of the block, then dot products of unit vectors."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        assert isinstance(config.choosing, LatticeChoosing)
        shape, size, rows = config.choosing, config.hidden_size, config.gamma + 1
        width = shape.width or size
        self.shape, self.rows, self.candidates = shape, rows, shape.candidates
        self.token_proj = None if width == size else nn.Linear(size, width)
        self.pass_hidden_proj = nn.Linear(size, width)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = LatticeMLP(FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, rows - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, shape.candidates, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(shape.heads, 2 * rows - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(shape.heads))
        self.context_proj = nn.Linear(size, width)
        self.layers = nn.ModuleList(LatticeLayer(width, shape, config.rms_norm_eps) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.anchor_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, shape.factors)
        self.in_head = nn.Linear(width, shape.factors)
        self.anchor_out_head = nn.Linear(width, shape.factors)

    def forward(
        self, logits: torch.Tensor, hidden: torch.Tensor, embedding: Rows, context: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as `CodebookSelector.forward`. embedding: [V, d] of the target. context: [R, d],
        `BlockModel.context` of the token before the anchor."""
        logits_of_ids, ids = likeliest(logits.float().log_softmax(-1), self.candidates)
        return ids, self.scores(logits_of_ids, ids, hidden, embedding, context)

    def scores(
        self, own: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, embedding: Rows, context: torch.Tensor
    ) -> torch.Tensor:
        """Return the scores of `forward` for candidates [R, G, K] with log probabilities `own` [R, G, K]."""
        count, slots = self.candidates, ids.shape[1]
        tokens = embedding[ids.flatten()].view(*ids.shape, -1).to(hidden.dtype)
        if self.token_proj is not None:
            tokens = self.token_proj(tokens)
        ranks = torch.arange(count, device=own.device)
        features = [own, own.exp(), own - own[..., :1], ranks / max(count - 1, 1), ranks == 0]
        stacked = torch.stack([feature.expand_as(own) for feature in features], -1).to(hidden.dtype)
        x = tokens + self.pass_hidden_proj(hidden)[:, :, None] + self.feature_mlp(self.feature_norm(stacked))
        x = (x + self.slot_embedding[0, :, :slots] + self.rank_embedding[0]).flatten(1, 2)
        bias = self._bias(slots)
        for layer in self.layers:
            x = layer(x, bias)
        x, anchor = self.output_norm(x), self.anchor_norm(self.context_proj(context))[:, None]
        parts = torch.cat([x, anchor.expand_as(x), x * anchor], -1)
        vectors = F.silu(self.factor_input_proj(parts)).view(len(ids), slots, count, -1)
        leaving, entering = self._unit(self.out_head(vectors)), self._unit(self.in_head(vectors))
        first = self._unit(self.anchor_out_head(anchor)).expand(-1, count, -1)[:, None]
        before = torch.cat([first, leaving[:, :-1]], 1)
        return (before @ entering.mT).float() * self.shape.scale

    def _unit(self, vectors: torch.Tensor) -> torch.Tensor:
        return F.normalize(vectors, dim=-1, eps=self.shape.eps)

    def _bias(self, slots: int) -> torch.Tensor:
        """Return [1, heads, L, L], added to the attention scores between candidates of two positions."""
        slot = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(self.shape.candidates)
        apart = slot[:, None] - slot
        same = (apart == 0) * self.same_slot_bias[:, None, None]
        return (self.relative_slot_bias[:, apart + self.rows - 1] + same)[None]


class LatticeMLP(nn.Module):
    """Two products with a SiLU between."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(inputs, inner)
        self.down_proj = nn.Linear(inner, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Attention of all candidates [R, L, h] to each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class LatticeLayer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, width: int, shape: LatticeChoosing, eps: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(width, eps)
        self.attn = LatticeAttention(width, shape.heads)
        self.mlp_norm = nn.RMSNorm(width, eps)
        self.mlp = LatticeMLP(width, int(width * shape.mlp_ratio), width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))
