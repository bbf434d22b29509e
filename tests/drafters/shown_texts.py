"""Texts shown to a drafter that reads tokens alone."""

from typing import Any

import torch

from outrider.drafters.base import DraftBatch, Drafter, Features


def show(drafter: Drafter, texts: list[list[int]], context: int, **fields: Any) -> DraftBatch:
    """Show all tokens but the last of each text, its anchor. Returns a greedy batch, or one with these fields."""
    count = len(texts)
    drafter.allocate(1 + context * count)
    table = (1 + torch.arange(context * count)).view(count, context)
    for row, text in enumerate(texts):
        cached = torch.tensor(text[:-1], dtype=torch.int64)
        drafter.observe(Features(None, cached, torch.arange(len(cached)), table[row, : len(cached)]))
    asked: dict[str, Any] = {
        "anchors": torch.tensor([text[-1] for text in texts]),
        "seq_lens": torch.tensor([len(text) - 1 for text in texts]),
        "page_table": table.int(),
        "rows": torch.arange(count),
        "temperatures": torch.zeros(count),
        "keys": torch.zeros(count, drafter.gamma, dtype=torch.int64),
    }
    return DraftBatch(**(asked | fields))
