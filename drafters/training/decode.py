"""The target writing many texts at once, by continuous batching.

A row whose text has ended goes to the next prompt at once, so the batch stays full until the last prompts. New prompts
and single tokens pass through the model as one flattened batch without padding, over the kernels that serve it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from outrider.kernels.attention import FlatBatch
from outrider.kernels.uniforms import Purpose, uniforms

from ..block.sampling import choose
from .flat import flat_layers
from .target import TargetModel

MIXED_TOKENS = 512
"""Prompt tokens from which on no further prompt joins a step; a longer prompt still goes in whole."""


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
    device = target.device
    lengths = sorted((len(p) + max_new_tokens for p in prompts), reverse=True)
    rows = min(rows, len(prompts))
    slots = max(lengths[0], rows * sum(lengths) // len(lengths))
    layers = flat_layers(target, slots, lengths[0])
    table = torch.zeros(rows, lengths[0], dtype=torch.int32, device=device)
    free_slots, free_rows = list(range(slots)), list(range(rows))
    live: dict[int, _Row] = {}
    waiting = list(range(len(prompts)))[::-1]
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
        batch = FlatBatch(
            qo_indptr=indptr.int(),
            kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            rows=torch.tensor(places, device=device),
            page_table=table,
        )
        places_of_tokens = table[batch.rows[batch.requests_of_tokens], batch.positions].long()
        hidden, _ = layers.forward(torch.tensor(ids, device=device), places_of_tokens, batch, ())
        logits = layers.logits(hidden[indptr[1:] - 1])
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
