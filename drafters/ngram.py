"""Prompt lookup: drafts by copying what followed the latest earlier occurrence of the last few tokens.

Saxena, Prompt Lookup Decoding (2023). Needs no model; strong where answers quote their prompt or repeat themselves.
"""

from __future__ import annotations

import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.history import SlotTokens


class NgramDrafter(Drafter):
    """Drafts gamma tokens where the last n tokens (longest n first, down to `min_match`) occurred before, else none.

    The draft is a function of the text so far, so q is a point mass. A match whose continuation runs into the end of
    the text goes on periodically: the text is then repeating itself.
    """

    def __init__(self, gamma: int, max_match: int = 4, min_match: int = 2):
        if not 1 <= min_match <= max_match:
            raise ValueError(f"expected 1 <= min_match <= max_match, got {min_match} and {max_match}")
        self.gamma = gamma
        self.max_match = max_match
        self.min_match = min_match

    def allocate(self, slots: int) -> None:
        self.history = SlotTokens(slots)

    def observe(self, features: Features) -> None:
        self.history.write(features.slots, features.tokens)

    def propose(self, batch: DraftBatch) -> Draft:
        lens = batch.seq_lens + 1  # the anchor is part of the text
        width = int(lens.max())
        text = self.history.read(batch.page_table, batch.rows, width)
        text[torch.arange(len(lens)), batch.seq_lens] = batch.anchors
        match, start = self._latest_match(text, lens)
        found = start >= 0
        period = (lens - start).clamp(min=1)
        offsets = torch.arange(self.gamma) % period[:, None]
        tokens = text.gather(1, (start[:, None] + offsets).clamp(min=0))
        agreement = self._agreement(text, match, tokens[:, 0])
        return Draft(
            tokens=tokens,
            lens=torch.where(found, self.gamma, 0),
            confidence=agreement[:, None].expand(-1, self.gamma) * found[:, None],
        )

    def _latest_match(self, text: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the continuation of the longest matching suffix begins.

        text: [R, L], lens: [R]. Returns match [R, L], true at every position whose preceding tokens match the
        suffix (for the length n that is used), and start [R], the last such position; -1 without a match.
        """
        positions = torch.arange(text.shape[1])
        inside = positions < lens[:, None]
        run = torch.ones_like(text, dtype=torch.bool)  # run[:, j]: the tokens before j equal the last n of the text
        best = torch.zeros_like(run)
        for n in range(1, self.max_match + 1):
            suffix = text.gather(1, (lens - n).clamp(min=0)[:, None])
            equal = torch.zeros_like(run)
            equal[:, n:] = text[:, :-n] == suffix
            run = run & equal & inside & (lens > n)[:, None]
            if n >= self.min_match:
                best = torch.where(run.any(1, keepdim=True), run, best)
        start = torch.where(best, positions, -1).amax(1)
        return best, start

    def _agreement(self, text: torch.Tensor, match: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """[R] share of the matches that were followed by the drafted token, with one success and one failure added."""
        agree = (match & (text == first[:, None])).sum(1)
        return (agree + 1.0) / (match.sum(1) + 2.0)
