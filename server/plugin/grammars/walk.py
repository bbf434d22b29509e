"""Random walks through a compiled grammar, which show whether it can be followed fast enough."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xgrammar

from .budget import GrammarBudget

WALKS = 4
SHORT_WALK, LONG_WALK = 32, 200
"""Choices of a walk, and of one in which a call has taken more than SUSPICIOUS_SECONDS."""
SUSPICIOUS_SECONDS = 0.002
FORCED_BYTES = 4096
"""Most text that is skipped at once where the grammar leaves no choice."""
PUNCTUATION = frozenset(b'"}],:')


@dataclass(frozen=True, slots=True)
class Walker:
    """Walks for one tokenizer. closing: tokens of punctuation alone, which end strings, lists and objects."""

    closing: npt.NDArray[np.int64]

    @classmethod
    def of(cls, tokenizer: xgrammar.TokenizerInfo) -> Self:
        texts = tokenizer.decoded_vocab
        return cls(np.array([token for token, text in enumerate(texts) if text and PUNCTUATION.issuperset(text)], int))

    def too_slow(self, compiled: xgrammar.CompiledGrammar, stop_tokens: list[int] | None = None) -> bool:
        """Return True if following the grammar takes longer than it may (`GrammarBudget`). stop_tokens: of matchers."""
        budget = GrammarBudget()
        for seed in range(WALKS):
            matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop_tokens)
            mask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
            # Half of the walks repeat tokens while allowed; the rest soon leave every loop.
            self._walk(matcher, mask, np.random.default_rng(seed), budget, repeats=seed % 2 == 1)
            if budget.exceeded:
                return True
        return False

    def begins(self, compiled: xgrammar.CompiledGrammar, stop_tokens: list[int] | None = None) -> bool:
        """Return True if any token may come first. A vocabulary may lack bytes of the text that a grammar requires."""
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop_tokens)
        mask = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
        return not matcher.fill_next_token_bitmask(mask) or bool(mask.any())

    def _walk(
        self, matcher: Any, mask: Any, random: np.random.Generator, budget: GrammarBudget, *, repeats: bool
    ) -> None:
        """Follow the grammar along allowed tokens. repeats: a token is likely to be taken again."""
        stops, token, choices = matcher.stop_token_ids, -1, 0
        while choices < (LONG_WALK if budget.worst > SUSPICIOUS_SECONDS else SHORT_WALK):
            choices += 1
            with budget:
                forced = matcher.find_jump_forward_string()[:FORCED_BYTES]
            if forced:  # a long text without a choice would hide the following parts
                with budget:
                    matcher.accept_string(forced)
            with budget:
                matcher.fill_next_token_bitmask(mask)
            allowed = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed[stops] = 0
            if not (repeats and token >= 0 and allowed[token] and random.random() < 0.9):
                token = self._choose(allowed, random)
            if token < 0:
                return
            with budget:
                matcher.accept_token(token)
            if budget.exceeded or matcher.is_terminated():
                return

    def _choose(self, allowed: npt.NDArray[np.uint8], random: np.random.Generator) -> int:
        """Return one of the allowed tokens, every second time of punctuation; -1 if none is allowed."""
        closing = self.closing[allowed[self.closing] != 0]
        choices = closing if closing.size and random.random() < 0.5 else np.flatnonzero(allowed)
        return int(random.choice(choices)) if choices.size else -1
