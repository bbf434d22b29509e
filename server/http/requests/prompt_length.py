"""Prompts that cannot fit into the context, refused before the tokenizer has read all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import bounds

SURE_BYTES = 200_000
"""A text of so many bytes has no more tokens than that, which the tokenizer hands over within a few milliseconds."""
SLICE_CHARACTERS = 8192
CUT_TOKENS = 32
"""Tokens that a cut can add: the pieces of a word on both sides of it."""


class PromptLength:
    """tokenizer: the model's. context_length: its tokens of prompt and answer."""

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        self.context_length = context_length
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
        # In characters of the vocabulary's own writing, which for bytes has one for each byte.
        self._longest = max(map(len, vocabulary), default=0)

    def check(self, texts: Iterable[str], param: str) -> None:
        """Raise ApiError where the texts of one prompt are surely longer than the context. May take long; for a thread.

        Texts are read in slices until the context is full, so a prompt that is longer takes as long as one that fits.
        """
        texts = list(texts)
        characters = sum(map(len, texts))
        # A normalizer may make one character of several.
        if self._longest and characters > 4 * self.context_length * self._longest:
            raise bounds.too_long(param, self.context_length)
        if self._backend is None:
            return
        if characters <= SURE_BYTES and sum(len(text.encode()) for text in texts) <= SURE_BYTES:
            return
        tokens = 0
        for text in texts:
            for start in range(0, len(text), SLICE_CHARACTERS):
                piece = text[start : start + SLICE_CHARACTERS]
                tokens += len(self._backend.encode(piece, add_special_tokens=False)) - CUT_TOKENS
                if tokens > self.context_length:
                    raise bounds.too_long(param, self.context_length)
