"""Prompt lookup: drafts by copying what followed the latest earlier occurrence of the last few tokens.

Saxena, Prompt Lookup Decoding (2023). Needs no model; strong where answers quote their prompt or repeat themselves.
"""

from __future__ import annotations

import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.slot_tokens import SlotTokens
from outrider.kernels.cpu import native

# Logits of the confidence: 1, log of the matched length (each accepted token lengthens it), log odds that earlier
# matches were followed by the drafted token, temperature. Logistic regression on lookups in 700 answers of
# SmolLM2-135M-Instruct (code, chat, math; temperatures 0, 0.7 and 1); another model's are corrected by calibration.
FIRST = (-2.01, 1.67, 1.00, -0.61)
LATER = (-2.32, 2.23, 0.23, -0.72)


class NgramDrafter(Drafter):
    """Drafts gamma tokens where the last n tokens (longest n first, down to `min_match`) occurred before, else none.

    The draft is a function of the text so far, so q is a point mass. A match whose continuation runs into the end of
    the text goes on periodically: the text is then repeating itself.
    """

    looks_up = True

    def __init__(self, gamma: int, max_match: int = 8, min_match: int = 2, device: torch.device | str = "cpu"):
        if not 1 <= min_match <= max_match:
            raise ValueError(f"expected 1 <= min_match <= max_match, got {min_match} and {max_match}")
        self.gamma = gamma
        self.max_match = max_match
        self.min_match = min_match
        self.device = device
        weights = torch.tensor(list(zip(FIRST, *[LATER] * (gamma - 1), strict=True)), device=device)
        constant, slope, self.by_odds, self.by_temperature = weights
        steps = torch.arange(gamma, device=device)
        lengths = (torch.arange(max_match + 1, device=device)[:, None] + steps).clamp(1, max_match)
        # [max_match + 1, gamma], what a match of that length gives; what is too short to be one gives a chance of 0.
        self.by_length = constant + slope * lengths.float().log()
        self.by_length[:min_match] = -torch.inf

    def allocate(self, slots: int) -> None:
        self.history = SlotTokens(slots, self.device)

    def observe(self, features: Features) -> None:
        self.history.write(features.slots, features.tokens)

    def propose(self, batch: DraftBatch) -> Draft:
        if native.fits(batch.temperatures):
            tokens, lens, confidence = torch.ops.outrider.lookup(
                self.history.tokens, batch.page_table, batch.rows, batch.seq_lens, batch.anchors, batch.temperatures,
                self.by_length, self.by_odds, self.by_temperature, self.min_match,
            )  # fmt: skip
        else:
            tokens, longest, agreeing, differing = self._search(batch)
            lens = torch.where(longest >= self.min_match, self.gamma, 0)
            confidence = self._confidence(longest, agreeing, differing, batch.temperatures)
        return Draft(tokens, lens, confidence, looked_up=torch.ones_like(lens, dtype=torch.bool))

    look_up = propose

    def _search(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What followed the latest of the longest matches [R, gamma], and of each request [R] that match's length, how
        many matches were followed by the first of these tokens, and how many by another one."""
        lens = batch.seq_lens + 1  # the anchor is part of the text
        width = int(lens.max()) if batch.longest is None else min(batch.longest, batch.page_table.shape[1])
        text = self.history.read(batch.page_table, batch.rows, width)
        text[torch.arange(len(lens), device=text.device), batch.seq_lens] = batch.anchors
        matched = self._matched_lengths(text, lens)
        # The latest of the longest: later positions win ties.
        start = (matched * width + torch.arange(width, device=text.device)).argmax(1)
        period = (lens - start).clamp(min=1)
        steps = torch.arange(self.gamma, device=text.device)
        tokens = text.gather(1, start[:, None] + steps % period[:, None])
        agreeing = ((matched >= self.min_match) & (text == tokens[:, :1])).sum(1)
        differing = (matched >= self.min_match).sum(1) - agreeing
        return tokens, matched.amax(1), agreeing, differing

    def _matched_lengths(self, text: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """[R, L] how many tokens before each position equal the last ones of its text, up to `max_match`.

        text: [R, L]. lens: [R]. Positions at or beyond a text's end count 0.
        """
        run = torch.arange(text.shape[1], device=text.device) < lens[:, None]
        matched = torch.zeros_like(text)
        for n in range(1, self.max_match + 1):
            suffix = text.gather(1, (lens - n).clamp(min=0)[:, None])
            equal = torch.zeros_like(run)
            equal[:, n:] = text[:, :-n] == suffix
            run = run & equal & (lens > n)[:, None]
            matched += run
        return matched

    def _confidence(
        self, longest: torch.Tensor, agreeing: torch.Tensor, differing: torch.Tensor, temperatures: torch.Tensor
    ) -> torch.Tensor:
        """[R, gamma] chance that a token is accepted if those before it were, 0 without a match; all arguments [R]."""
        odds = ((agreeing + 0.5) / (differing + 0.5)).log_()
        logits = self.by_length[longest]
        logits += odds[:, None] * self.by_odds
        logits += temperatures[:, None] * self.by_temperature
        return logits.sigmoid_()
