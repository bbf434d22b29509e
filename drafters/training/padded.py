"""Attention of a flattened batch for devices that have no ragged kernel: requests of a kind padded to one rectangle.

Prompts and single tokens make a rectangle each, so that neither is padded to the other. What a step's layers share is
made once; between layers nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from outrider.kernels.flat_batch import FlatBatch


@dataclass(frozen=True, slots=True)
class Rectangle:
    """R requests of up to Q queries that see up to L positions.

    queries: [R, Q] int64, rows of q; a request's last query fills the places left over.
    tokens: [M] int64, the queries covered; places: [M] int64, where each stands in `queries.flatten()`.
    slots: [R, L] int64, where keys and values lie.
    seen: [R, 1, Q, L] bool.
    """

    queries: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor


def rectangles(batch: FlatBatch, window: int = -1) -> list[Rectangle]:
    """Requests with one query, and the others; window: as of `flat_attention`."""
    starts = batch.host_indptr
    counts = [b - a for a, b in pairwise(starts)]
    device, out = batch.page_table.device, []
    for single in (True, False):
        chosen = [r for r, count in enumerate(counts) if count and (count == 1) == single]
        if not chosen:
            continue
        widest, longest = max(counts[r] for r in chosen), max(batch.host_kv_lens[r] for r in chosen)
        first = torch.tensor([starts[r] for r in chosen])[:, None]
        length = torch.tensor([counts[r] for r in chosen])[:, None]
        ends = torch.tensor([batch.host_kv_lens[r] for r in chosen])[:, None]
        at = torch.arange(widest).expand(len(chosen), -1)
        inside = at < length
        reach = (ends - length + at)[..., None]  # positions of the queries
        context = torch.arange(longest)
        seen = (context <= reach) & ((context >= reach - window) | (window < 0))
        rows = batch.rows[torch.tensor(chosen, device=device)]
        slots = batch.page_table[rows, :longest].long()
        queries = first + torch.minimum(at, length - 1)
        moved = (queries, queries[inside], inside.flatten().nonzero()[:, 0], seen[:, None])
        queries, tokens, places, mask = (x.to(device) for x in moved)
        out.append(
            Rectangle(queries, tokens, places, slots.where(context.to(device) < ends.to(device), slots[:, :1]), mask)
        )
    return out


def padded_attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, shapes: list[Rectangle], *, scale: float
) -> torch.Tensor:
    """Causal `flat_attention`; q: [N, Hq, D]; pools: [S, Hkv, D]. Returns [N, Hq, D].

    The queries that share a key head stand beside each other, so no key is copied for them.
    """
    out = torch.empty_like(q)
    for shape in shapes:
        requests, queries = shape.queries.shape
        heads, groups, dim = q.shape[1], k_pool.shape[1], q.shape[2]
        k, v = (pool[shape.slots].transpose(1, 2) for pool in (k_pool, v_pool))
        folded = q[shape.queries].view(requests, queries, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)
        mask = shape.seen[:, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(2, 3)
        found = F.scaled_dot_product_attention(folded.flatten(2, 3), k, v, attn_mask=mask, scale=scale)
        found = found.view(requests, groups, heads // groups, queries, dim).permute(0, 3, 1, 2, 4)
        out[shape.tokens] = found.reshape(-1, heads, dim)[shape.places]
    return out
