"""Prompt lookup: drafts by copying the tokens that followed the latest earlier occurrence of the last few tokens.

Saxena, Prompt Lookup Decoding (2023). Needs no model; strong where answers quote their prompt or repeat themselves, or,
with `corpora.py`, repeat earlier prompts and answers.
"""

import torch

from outrider.kernels.cpu import native
from outrider.kernels.cuda import native as cuda

from .base import Draft, DraftBatch, Drafter, Features
from .corpora import Corpora
from .forced_first import forced_first
from .slot_tokens import SlotTokens

# Weights of the confidence's logit: 1, log of the matched length (each accepted token lengthens it), log odds that
# earlier matches were followed by the drafted token, the same of all places with just the last token, temperature.
# Logistic regression on lookups in 5,700 answers of SmolLM2-135M-Instruct (code, chat, math; temperatures 0, 0.7, 1);
# calibration corrects them for other models.
FIRST = (-1.23, 1.01, 0.69, 0.37, -0.53)
LATER = (-1.02, 1.30, 0.07, 0.05, -0.59)
Weights = tuple[float, float, float, float, float]
# The same for drafts from other texts: the log odds count the compared matches, and the log of their number
# takes the place of the other odds. From 42,600 such drafts in 786 answers, each looked up in the prompts and answers
# before it.
FIRST_ACROSS = (-2.64, 0.85, 0.95, 0.40, -0.59)
LATER_ACROSS = (-2.24, 1.24, -0.03, -0.06, -0.44)
SHORTEST_MATCH, LONGEST_MATCH = 2, 32
"""Tokens. Confidence rises with the length of the match up to the longest; shorter ones than the shortest are none."""
AT_A_TIME = 1 << 24
"""Comparisons made at once by a search without compiled kernels."""


class NgramDrafter(Drafter):
    """Drafts gamma tokens where the last n tokens (longest n first, down to SHORTEST_MATCH) occurred before, else none.

    The draft is a function of the text so far, so q is a point mass. If a match continues up to the end of the
    text, the text repeats itself, and so does the draft.

    corpora: other texts, which may contain a longer match; on a CPU with compiled kernels.
    """

    looks_up = True

    def __init__(self, gamma: int, device: torch.device | str = "cpu", corpora: Corpora | None = None):
        self.gamma, self.device, self.corpora = gamma, device, corpora
        self.by_length, self.by_odds, self.by_temperature = self._tables(FIRST, LATER)
        self._across = self._tables(FIRST_ACROSS, LATER_ACROSS)
        self._all = torch.ones(1, dtype=torch.bool, device=device)

    def _tables(self, first: Weights, later: Weights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits by length [LONGEST_MATCH + 1, gamma], by log odds [2, gamma] and by temperature [gamma]."""
        gamma, device = self.gamma, self.device
        weights = torch.tensor(list(zip(first, *[later] * (gamma - 1), strict=True)), device=device)
        constant, slope, by_temperature = weights[[0, 1, 4]]
        steps = torch.arange(gamma, device=device)
        lengths = (torch.arange(LONGEST_MATCH + 1, device=device)[:, None] + steps).clamp(1, LONGEST_MATCH)
        by_length = constant + slope * lengths.float().log()
        by_length[:SHORTEST_MATCH] = -torch.inf  # a match that is too short has chance 0
        return by_length, weights[2:4].contiguous(), by_temperature

    def allocate(self, slots: int) -> None:
        self.history = SlotTokens(slots, self.device)

    def slot_state(self) -> list[torch.Tensor]:
        return [self.history.tokens]

    def observe(self, features: Features) -> None:
        self.history.write(features.slots, features.tokens)

    def propose(self, batch: DraftBatch) -> Draft:
        across = None
        given = (
            self.history.tokens, batch.page_table, batch.rows, batch.seq_lens, batch.anchors, batch.temperatures,
            self.by_length, self.by_odds, self.by_temperature, SHORTEST_MATCH,
        )  # fmt: skip
        if self.corpora is not None and batch.corpora is not None:
            tokens, lens, confidence, across = self.corpora.native.lookup(*given, batch.corpora, *self._across)
        elif native.fits(batch.temperatures):
            tokens, lens, confidence = torch.ops.outrider.lookup(*given)
        elif cuda.fits(batch.temperatures):
            tokens, lens, confidence = cuda.lookup.lookup(*given)
        else:
            tokens, longest, odds = self._search(batch)
            lens = torch.where(longest >= SHORTEST_MATCH, self.gamma, 0)
            logits = self.by_length[longest] + odds @ self.by_odds
            confidence = (logits + batch.temperatures[:, None] * self.by_temperature).sigmoid_()
        draft = Draft(tokens, lens, confidence, looked_up=self._all.expand(len(lens)), across=across)
        return draft if batch.forced is None else forced_first(draft, batch.forced)

    look_up = propose

    def _search(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the latest of the longest matches. Returns the tokens after it [R, gamma], its length [R], and log odds
        [R, 2] that matches, of SHORTEST_MATCH or more tokens and of one, were followed by the first of these tokens."""
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
        counted = torch.stack([matched >= SHORTEST_MATCH, matched >= 1], 1)
        agreeing = (counted & (text == tokens[:, :1])[:, None]).sum(2)
        odds = ((agreeing + 0.5) / (counted.sum(2) - agreeing + 0.5)).log_()
        return tokens, matched.amax(1), odds

    def _matched_lengths(self, text: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Return [R, L] how many tokens before each position equal the last ones of its text, up to LONGEST_MATCH.

        text: [R, L], tokens of at least 0. lens: [R]. Positions at or beyond a text's end count 0.
        """
        width, longest = text.shape[1], LONGEST_MATCH
        steps = torch.arange(longest, device=text.device)
        ends = lens[:, None] - longest + steps
        suffix = text.gather(1, ends.clamp(min=0)).masked_fill_(ends < 0, -1)[:, None]
        before = torch.nn.functional.pad(text, (longest, 0), value=-2).unfold(1, longest, 1)[:, :width]
        # The last token that differs ends a match.
        wrong = [
            torch.where(part == suffix, -1, steps.to(torch.int8)).amax(2)
            for part in before.split(max(1, AT_A_TIME // (len(text) * longest)), 1)
        ]
        matched = longest - 1 - torch.cat(wrong, 1).long()
        return matched * (torch.arange(width, device=text.device) < lens[:, None])
