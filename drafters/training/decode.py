"""The target writing many texts at once, by continuous batching.

A row whose text has ended goes to the next prompt at once, so the batch stays full until the last prompts. New prompts
and single tokens pass through the model as one flattened batch without padding, over the kernels that serve it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.kernels.attention import FlatBatch, flat_attention
from outrider.kernels.uniforms import Purpose, uniforms

from ..block.sampling import choose
from .target import TargetModel

ATTENTION = "outrider_flat"
MIXED_TOKENS = 512
"""Prompt tokens from which on no further prompt joins a step; a longer prompt still goes in whole."""


@dataclass
class PagedCache:
    """Keys and values of every layer by slot, and what the present step does with them.

    slots: [N] int64, where its tokens go; batch: which request they belong to.
    """

    size: int
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    batch: FlatBatch | None = None

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put [N, Hkv, D] keys and values into the layer's pools [size, Hkv, D], which are returned."""
        if layer not in self.layers:
            self.layers[layer] = (
                key.new_zeros(self.size, *key.shape[1:]),
                value.new_zeros(self.size, *value.shape[1:]),
            )
        keys, values = self.layers[layer]
        keys[self.slots], values[self.slots] = key, value
        return keys, values


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_cache: PagedCache | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: ours where a step brings its `paged_cache`, torch's everywhere else."""
    if paged_cache is None or paged_cache.batch is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **others
        )
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    keys, values = paged_cache.write(int(module.layer_idx), k, v)  # type: ignore[arg-type]
    out = flat_attention(
        q, keys, values, paged_cache.batch,
        scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
        window=-1 if sliding_window is None else sliding_window - 1,
        logit_cap=softcap or 0.0,
    )  # fmt: skip
    return out[None], None


@dataclass
class _Row:
    """A text under way: its prompt's number, all its tokens, how many of them are the prompt, the slots it owns."""

    number: int
    ids: list[int]
    prompt: int
    slots: list[int]


@torch.inference_mode()
def decode(
    target: TargetModel,
    prompts: list[list[int]],
    temperatures: list[float],
    *,
    max_new_tokens: int,
    stop_ids: set[int],
    seeds: list[int],
    rows: int = 64,
) -> Iterator[tuple[int, list[int], str]]:
    """Continue every prompt; yields (index, new ids, "eos" or "limit") as each one ends, `rows` of them at a time.

    A text depends on its own prompt, temperature and seed alone, but for what rounding does in other company.
    """
    if not prompts:
        return
    device, model = target.device, target.model
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    lengths = sorted((len(p) + max_new_tokens for p in prompts), reverse=True)
    rows = min(rows, len(prompts))
    cache = PagedCache(max(lengths[0], rows * sum(lengths) // len(lengths)))
    table = torch.zeros(rows, lengths[0], dtype=torch.int32, device=device)
    free_slots, free_rows = list(range(cache.size)), list(range(rows))
    live: dict[int, _Row] = {}
    waiting = list(range(len(prompts)))[::-1]
    unmasked = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)  # four dimensions: transformers makes no other
    while waiting or live:
        joined = 0
        while waiting and free_rows and joined < MIXED_TOKENS:
            prompt = prompts[waiting[-1]]
            need = len(prompt) + max_new_tokens
            if need > len(free_slots):
                break
            number, row = waiting.pop(), free_rows.pop()
            owned = [free_slots.pop() for _ in range(need)]
            live[row] = _Row(number, list(prompt), len(prompt), owned)
            table[row, :need] = torch.tensor(owned, dtype=torch.int32, device=device)
            joined += len(prompt)
        places, texts = list(live), list(live.values())
        counts = [len(text.ids) if len(text.ids) == text.prompt else 1 for text in texts]
        lens = [len(text.ids) for text in texts]
        ids = [token for text, count in zip(texts, counts, strict=True) for token in text.ids[-count:]]
        indptr = torch.tensor([0, *counts], device=device).cumsum(0)
        cache.batch = FlatBatch(
            qo_indptr=indptr.int(),
            kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            rows=torch.tensor(places, device=device),
            page_table=table,
        )
        positions, owner = cache.batch.positions, cache.batch.requests_of_tokens
        cache.slots = table[cache.batch.rows[owner], positions].long()
        hidden = model.model(
            input_ids=torch.tensor([ids], device=device), position_ids=positions[None], attention_mask=unmasked,
            use_cache=False, paged_cache=cache,
        ).last_hidden_state[0]  # fmt: skip
        if not cache.layers:
            raise ValueError(f"{type(model).__name__} does not use transformers' attention interface")
        logits = F.linear(hidden[indptr[1:] - 1], target.head)
        heat = torch.tensor([temperatures[text.number] for text in texts], device=device)
        streams = torch.tensor([seeds[text.number] for text in texts], device=device)
        points = uniforms(streams, torch.tensor(lens, device=device), 1, Purpose.FINAL)[:, 0]
        chosen, _ = choose(logits.float(), heat, points)
        for row, text, token in zip(places, texts, chosen.tolist(), strict=True):
            text.ids.append(token)
            if token in stop_ids or len(text.ids) - text.prompt >= max_new_tokens:
                free_rows.append(row)
                free_slots += text.slots
                del live[row]
                yield text.number, text.ids[text.prompt :], "eos" if token in stop_ids else "limit"
