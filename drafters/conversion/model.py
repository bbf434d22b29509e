"""The network being converted: the target's layers with low-rank deltas, and its two passes.

Finished rows are read first, without seeing any open block; open blocks then read their keys and values. Both passes
are plain functions of rows, so training, validation and decoding share them, and gradients flow through either.

A projection with its delta is one product, y = x (W + B A)^T. The sum is computed once per step in the dtype that is
served, so training rounds as serving does; a backward is one product and four thin ones.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..block.config import BlockConfig
from ..block.layers import DraftLayer
from ..block.model import DraftModel
from ..training.batches import Tile
from ..training.forward import blocks_attention
from ..training.start import copy_layers
from ..training.target import TargetModel
from .layout import Layout

PROJECTIONS = ("qkv", "o_proj", "gate_up", "down_proj")
Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [C, Hkv, D] of finished rows, by layer."""


def finished_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return attention [Q, Hq, D] of rows q [Q, Hq, D] over k, v [K, Hkv, D]; seen: [Q, K] bool. Uses plain products on
    a CPU, where torch's fused attention is slower at these lengths."""
    if q.device.type != "cpu":
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        fused = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        return fused[0].transpose(0, 1)
    queries, heads, dim = q.shape
    groups = k.shape[1]
    flat = (q * dim**-0.5).view(queries, groups, -1, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)
    unseen = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    weights = ((flat @ k.permute(1, 2, 0)).view(groups, -1, *seen.shape) + unseen).softmax(-1)
    out = weights.view(groups, -1, len(k)) @ v.transpose(0, 1)
    return out.view(groups, -1, queries, dim).permute(2, 0, 1, 3).reshape(queries, heads, dim)


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, merged, a, b):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, merged, a, b)
        return x @ merged.T

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, merged, a, b = ctx.saved_tensors
        grad_x = grad @ merged if ctx.needs_input_grad[0] else None
        grad_a = (grad @ b).T @ x
        grad_b = ((x @ a.T).T @ grad).T
        return grad_x, None, grad_a, grad_b


class LowRankLinear(nn.Module):
    """weight: [out, in], frozen; a: [r, in] and b: [out, r], trained, b from 0. Call `merge` after every change."""

    merged: torch.Tensor

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        out, into = linear.weight.shape
        self.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, into) * into**-0.5)
        self.b = nn.Parameter(torch.zeros(out, rank))
        self.register_buffer("merged", self.weight.detach().clone(), persistent=False)

    @torch.no_grad()
    def merge(self) -> None:
        """Compute the weights that the forward uses."""
        torch.addmm(self.weight, self.b, self.a, out=self.merged)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _MergedLinear.apply(x, self.merged, self.a, self.b)
        return out


class ConvertedModel(DraftModel):
    """The target's layers, each projection with a delta of rank r, and the mask's input embedding [d].

    vocab: [V - 1], all tokens but the mask, which is never predicted.
    """

    kinds = ()

    def __init__(self, config: BlockConfig, layout: Layout, rank: int) -> None:
        mask = layout.mask_token_id
        super().__init__(config, torch.cat([torch.arange(mask), torch.arange(mask + 1, config.vocab_size)]))
        self.layout, self.rank = layout, rank
        self.mask = nn.Parameter(torch.zeros(config.hidden_size))
        layers = [DraftLayer(config) for _ in range(config.num_layers)]
        for layer in layers:
            for name in PROJECTIONS:
                setattr(layer, name, LowRankLinear(getattr(layer, name), rank))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.requires_grad_(False)
        for parameter in (self.mask, *self.deltas().values()):
            parameter.requires_grad_(True)

    def projections(self) -> dict[str, LowRankLinear]:
        """Return the projections by name, from `layers.0.qkv` to the last layer's `down_proj`."""
        return {name: module for name, module in self.named_modules() if isinstance(module, LowRankLinear)}

    def deltas(self) -> dict[str, nn.Parameter]:
        """Return the trained factors by name, such as `layers.0.qkv.a`."""
        return {f"{name}.{k}": p for name, module in self.projections().items() for k, p in module.named_parameters()
                if k != "weight"}  # fmt: skip

    def merge(self) -> None:
        """Merge the deltas into the weights; call it after every change of them."""
        for module in self.projections().values():
            module.merge()

    @torch.no_grad()
    def start_from(self, target: TargetModel) -> None:
        """Copy the target's weights; the mask starts as the mean of all embeddings."""
        copy_layers(self, target, range(self.config.num_layers))
        self.mask.copy_(target.embedding.float().mean(0))
        self.merge()

    def read_finished(self, embedded: torch.Tensor, spans: list[tuple[int, int]]) -> tuple[torch.Tensor, Cache]:
        """Return normed states [C, d] of finished rows [C, d], and their keys and values. spans: first row and length
        of each sequence, which begins at position 0."""
        places = [torch.arange(length, device=embedded.device) for _, length in spans]
        masks = [self.layout.seen(at, at) for at in places]
        cache: Cache = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.append((k, v))
            rows = [slice(start, start + length) for start, length in spans]
            return torch.cat([finished_attention(q[r], k[r], v[r], m) for r, m in zip(rows, masks, strict=True)])

        return self(embedded, torch.cat(places), attend), cache

    def read_open(self, embedded: torch.Tensor, starts: torch.Tensor, cache: Cache, tiles: list[Tile]) -> torch.Tensor:
        """Return normed states [A, B, d] of open blocks' inputs [A, B, d] that begin at positions `starts` [A]. tiles:
        which finished rows of the cache each block sees: the rows before its start."""
        blocks, size = embedded.shape[:2]
        positions = starts[:, None] + torch.arange(size, device=starts.device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.reshape(-1, size, *x.shape[1:]) for x in (q, k, v))
            return blocks_attention(q, k, v, cache[layer], tiles).flatten(0, 1)

        return self(embedded.flatten(0, 1), positions.flatten(), attend).view(blocks, size, -1)

    def inputs(self, embedding: torch.Tensor, ids: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Return embeddings [..., d] of tokens, the mask's own where `masked`."""
        return torch.where(masked[..., None], self.mask, embedding[ids])


def spare_token(target: TargetModel) -> int:
    """Return the last special token that neither the chat template nor the tokenizer uses. Raises ValueError where
    there is none."""
    tokenizer = target.tokenizer
    template = tokenizer.chat_template or ""
    added = tokenizer.added_tokens_decoder.items()
    spare = [i for i, t in added if t.special and t.content not in template and i not in tokenizer.all_special_ids]
    spare = [i for i in spare if i < target.config.vocab_size and i not in target.stop_ids]
    if not spare:
        raise ValueError("the tokenizer has no special token to spare for the mask; name one with --mask-token")
    return max(spare)


def convert(target: TargetModel, config: BlockConfig, layout: Layout, rank: int) -> ConvertedModel:
    """Return the target's own network with deltas of zero; raises ValueError for an unsupported architecture."""
    attention = target.model.model.layers[0].self_attn
    if attention.q_proj.bias is not None or target.config.model_type not in ("llama", "qwen3"):
        raise ValueError(f"a {target.config.model_type} model cannot be converted, only llama and qwen3 without biases")
    model = ConvertedModel(config, layout, rank)
    model.start_from(target)
    return model
