"""References of the kernels, by definition, one request or row at a time."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from outrider.kernels.acceptance import Verification, mass
from outrider.kernels.blocks import expand
from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.low_rank import Part
from outrider.kernels.noise import torch_gumbel_argmax


def plain(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of an operation without compiled kernels."""
    with mock.patch.object(native, "available", return_value=False):
        return operation(*arguments, **options)


def reference_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Product of x [..., D] and a weight [outputs, D], transposed, in float64."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).to(x.dtype)


def reference_block_linear(
    x: torch.Tensor, raw: torch.Tensor, kind: str, outputs: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference of `block_linear(x, pack_blocks(raw, kind, outputs, depth, bias))`, in float64."""
    return reference_linear(x, expand(raw, kind, outputs, x.shape[-1]), bias)


def reference_low_rank_product(x: torch.Tensor, parts: Sequence[Part], outputs: int) -> torch.Tensor:
    """Reference of `low_rank_product`, in float64."""
    out = torch.zeros(len(x), outputs, dtype=torch.float64)
    for part in parts:
        change = x.double() @ part.down.double().T @ part.up.double().T
        out[:, part.first : part.first + len(part.up)] += part.scale * change
    return out.to(x.dtype)


def reference_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: FlatBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int = -1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `flat_attention`, one request at a time."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_pool.shape[2])
    for r, (start, stop) in enumerate(zip(batch.host_indptr, batch.host_indptr[1:], strict=False)):
        length = batch.host_kv_lens[r]
        slots = batch.page_table[batch.rows[r], :length].long()
        group = q.shape[1] // k_pool.shape[1]
        keys, values = (pool[slots].float().repeat_interleave(group, 1) for pool in (k_pool, v_pool))
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
        scores = logit_cap * torch.tanh(scores / logit_cap) if logit_cap > 0 else scores
        i = torch.arange(length - (stop - start), length, device=q.device)[:, None]
        j = torch.arange(length, device=q.device)
        unseen = ((j > i) & causal) | ((j < i - window) & (window >= 0))
        scores = scores.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, stop - start, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def reference_target_probs(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `target_probs`, one row at a time, by a complete sort."""
    out = torch.zeros_like(logits, dtype=torch.float32)
    for b, row in enumerate(logits.float()):
        if temperatures[b] <= 0:
            out[b, row.argmax()] = 1
            continue
        ranked, tokens = (row / temperatures[b]).softmax(-1).sort(descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        if top_ks is not None:
            ranked[int(top_ks[b]) :] = 0
        if top_ps is not None and top_ps[b] < 1:
            ranked[before > top_ps[b]] = 0
        if min_ps is not None:
            ranked[ranked < ranked[0] * min_ps[b]] = 0
        out[b, tokens] = ranked / ranked.sum()
    return out


def reference_accept(batch: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `accept`, with q spread over the whole vocabulary."""
    tokens, _, qo_indptr, _, _, wanted, probs, *_ = batch
    decided = torch.full((len(tokens),), probs is None) if batch.decided is None else batch.decided
    lens = torch.ones_like(batch.verify_lens, dtype=torch.int64)
    out = tokens.new_zeros(tokens.shape[0], tokens.shape[1] + 1)
    for r in range(len(tokens)):
        drafts, start = tokens[r, : batch.verify_lens[r]].tolist(), int(qo_indptr[r])
        if wanted is not None and decided[r]:
            kept = 0
            while kept < len(drafts) and drafts[kept] == int(wanted[start + kept]):
                kept += 1
            final = wanted[start + kept]
        elif probs is not None and batch.uniforms is not None and batch.final_keys is not None:
            p, q = probs[start : start + len(drafts) + 1], _spread(batch, r, drafts)
            rule = _kept_by_block if batch.by_block and batch.draft_probs is not None else _kept_by_token
            kept, weights = rule(drafts, p, q, batch.uniforms[r].tolist())
            final = torch_gumbel_argmax(weights[None], batch.final_keys[r, None])
        lens[r] = kept + 1
        out[r, : kept + 1] = torch.tensor([*drafts[:kept], int(final)])
    return lens, out


def _spread(batch: Verification, r: int, drafts: list[int]) -> torch.Tensor:
    """[N, V] float32, q of request r's N drafts over the target's vocabulary."""
    q = torch.zeros(len(drafts), batch.probs.shape[1])
    for k, x in enumerate(drafts):
        columns = torch.arange(q.shape[1]) if batch.vocab is None else batch.vocab
        q[k, x if batch.draft_probs is None else columns] = (
            1.0 if batch.draft_probs is None else batch.draft_probs[r, k]
        )
    return q


def _kept_by_token(
    drafts: list[int], p: torch.Tensor, q: torch.Tensor, uniforms: list[float]
) -> tuple[int, torch.Tensor]:
    """Number of drafts kept, and weights [V] of the next token: p [N + 1, V], q [N, V]."""
    for k, x in enumerate(drafts):
        if uniforms[k] * q[k, x].item() >= p[k, x].item():
            rest = (p[k] - q[k]).clamp(min=0)
            return k, rest if rest.any() else p[k]
    return len(drafts), p[len(drafts)]


def _kept_by_block(
    drafts: list[int], p: torch.Tensor, q: torch.Tensor, uniforms: list[float]
) -> tuple[int, torch.Tensor]:
    scale, kept, weights = torch.ones(()), 0, p[0]
    for k in range(len(drafts) + 1):
        last = k == len(drafts)
        rest = p[k] if last else (scale.double() * p[k].double() - q[k].double()).clamp(min=0).float()
        s, left = scale.item(), mass(rest[None]).item()
        if k == 0 or s == 1 or (uniforms[k - 1] < s if last else uniforms[k - 1] * (left + (1 - s)) < left):
            kept, weights = k, rest if rest.any() else p[k]
        if not last:
            joint, q_x = s * p[k, drafts[k]].item(), q[k, drafts[k]].item()
            scale = torch.tensor(0.0 if not joint > 0 else 1.0 if joint >= q_x else joint / q_x)
    return kept, weights
