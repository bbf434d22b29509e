"""The target writes many texts at once, by continuous batching.

When a text ends, its row takes the next prompt at once, so the batch stays full until the last prompts. New prompts and
single tokens pass through the model as one flattened batch without padding, with the kernels that also serve it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.noise import Purpose, streams
from outrider.kernels.sampling import Rules

from ..block.sampling import draw_columns
from .flat import flat_layers
from .target import TargetModel

JOINING = 8
"""Prompt tokens per row after which no further prompt joins a step; a longer prompt still goes in whole."""


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A text that has ended. number: its prompt's. ids: the tokens written. finish: "eos" or "limit"."""

    number: int
    ids: list[int]
    finish: str


@dataclass(slots=True)
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
) -> Iterator[WrittenText]:
    """Continue every prompt, `rows` of them at a time; yield each text as soon as it has ended. A text depends on its
    own prompt, temperature and seed alone, apart from rounding that varies with the batch."""
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
        while waiting and free_rows and joined < JOINING * rows:
            prompt = prompts[waiting[-1]]
            need = len(prompt) + max_new_tokens
            if need > len(free_slots):
                break
            number, row = waiting.pop(), free_rows.pop()
            owned = [free_slots.pop() for _ in range(need)]
            live[row] = _Row(number, list(prompt), len(prompt), owned)
            table[row, :need] = torch.tensor(owned, dtype=torch.int32, device=device)
            joined += len(prompt)
        texts = list(live.values())
        batch, ids = _flatten(live, table)
        places = table[batch.rows[batch.requests_of_tokens], batch.positions].long()
        hidden = layers.forward(ids, places, batch)
        logits = layers.logits(hidden[batch.qo_indptr[1:].long() - 1]).float()
        heat = torch.tensor([temperatures[text.number] for text in texts], device=device)
        row_seeds = torch.tensor([seeds[text.number] for text in texts], device=device)
        chosen, _ = draw_columns(logits, Rules(heat), streams(row_seeds, batch.kv_lens.long(), Purpose.TOKEN))
        for (row, text), token in zip(list(live.items()), chosen.tolist(), strict=True):
            text.ids.append(token)
            if token in stop_ids or len(text.ids) - text.prompt >= max_new_tokens:
                free_rows.append(row)
                free_slots += text.slots
                del live[row]
                yield WrittenText(text.number, text.ids[text.prompt :], "eos" if token in stop_ids else "limit")


def _flatten(live: dict[int, _Row], table: torch.Tensor) -> tuple[FlatBatch, torch.Tensor]:
    """Return the next step and its ids [N]: whole prompts of new texts, the last token of running ones."""
    device = table.device
    counts = [len(text.ids) if len(text.ids) == text.prompt else 1 for text in live.values()]
    ids = [token for text, count in zip(live.values(), counts, strict=True) for token in text.ids[-count:]]
    lens = [len(text.ids) for text in live.values()]
    batch = FlatBatch(
        qo_indptr=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        kv_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        rows=torch.tensor(list(live), device=device),
        page_table=table,
    )
    return batch, torch.tensor(ids, device=device)
