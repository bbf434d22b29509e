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
from .store import Sequence
from .target import TargetModel

JOINING = 8
"""Prompt tokens per row after which no further prompt joins a step; a longer prompt still goes in whole."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Training data of a text besides its tokens: outputs of these layers, and this many likeliest tokens."""

    layers: tuple[int, ...]
    top: int


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A text that has ended. number: its prompt's. ids: the tokens written. finish: "eos" or "limit". sequence: prompt
    and text with their training data, on the CPU; None if none was wanted."""

    number: int
    ids: list[int]
    finish: str
    sequence: Sequence | None


@dataclass(slots=True)
class _Row:
    """A text under way: its prompt's number, all its tokens, how many of them are the prompt, the slots it owns."""

    number: int
    ids: list[int]
    prompt: int
    slots: list[int]


class _SlotFeatures:
    """Kept data by KV slot: a token's features, and the likeliest next tokens."""

    def __init__(self, wanted: FeatureSpec, slots: int, target: TargetModel) -> None:
        width, device = len(wanted.layers) * target.config.hidden_size, target.device
        self.features = torch.zeros(slots, width, dtype=torch.bfloat16, device=device)
        self.ids = torch.zeros(slots, wanted.top, dtype=torch.int32, device=device)
        self.probs = torch.zeros(slots, wanted.top, device=device)

    def put(self, slots: torch.Tensor, features: torch.Tensor, last: torch.Tensor, logits: torch.Tensor) -> None:
        """Store features [N, m*d] of the tokens in `slots` [N], and float32 logits [R, V] of `slots[last]`."""
        self.features[slots] = features.to(self.features.dtype)
        values, ids = logits.topk(self.ids.shape[1], -1)
        self.ids[slots[last]] = ids.int()
        self.probs[slots[last]] = (values - logits.logsumexp(-1, keepdim=True)).exp()

    def take(self, text: _Row) -> Sequence:
        """Return a text that has ended; its last token never went through the model."""
        slots = torch.tensor(text.slots[: len(text.ids)], device=self.ids.device)
        features = self.features[slots]
        features[-1] = 0
        answered = slots[text.prompt - 1 : -1]
        ids, probs = self.ids[answered].long().cpu(), self.probs[answered].cpu()
        return Sequence(torch.tensor(text.ids), text.prompt, features.cpu(), ids, probs)


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
    wanted: FeatureSpec | None = None,
) -> Iterator[WrittenText]:
    """Continue every prompt, `rows` of them at a time; yield each text as soon as it has ended. A text depends on its
    own prompt, temperature and seed alone, apart from rounding that varies with the batch."""
    if not prompts:
        return
    device, read = target.device, wanted.layers if wanted else ()
    lengths = sorted((len(p) + max_new_tokens for p in prompts), reverse=True)
    rows = min(rows, len(prompts))
    slots = max(lengths[0], rows * sum(lengths) // len(lengths))
    layers = flat_layers(target, slots, lengths[0], read)
    kept = _SlotFeatures(wanted, slots, target) if wanted else None
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
        hidden, features = layers.forward(ids, places, batch, read)
        last = batch.qo_indptr[1:].long() - 1
        logits = layers.logits(hidden[last]).float()
        if kept:
            kept.put(places, features, last, logits)
        heat = torch.tensor([temperatures[text.number] for text in texts], device=device)
        row_seeds = torch.tensor([seeds[text.number] for text in texts], device=device)
        chosen, _ = draw_columns(logits, Rules(heat), streams(row_seeds, batch.kv_lens.long(), Purpose.TOKEN))
        for (row, text), token in zip(list(live.items()), chosen.tolist(), strict=True):
            text.ids.append(token)
            if token in stop_ids or len(text.ids) - text.prompt >= max_new_tokens:
                free_rows.append(row)
                free_slots += text.slots
                del live[row]
                sequence = kept.take(text) if kept else None
                yield WrittenText(
                    text.number, text.ids[text.prompt :], "eos" if token in stop_ids else "limit", sequence
                )


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
