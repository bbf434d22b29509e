"""Find the text of each token of an answer, however the engine groups tokens."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from sglang.srt.utils.patch_tokenizer import decode_without_hf_kwargs

INCOMPLETE = "�"
"""Character that a decoder writes for an incomplete character."""


class TokenTexts:
    """Cuts the text of one answer where its tokens end.

    The cuts depend on the tokens alone, not on their grouping. They equal those of SGLang's detokenizer with one token
    at a time: a token that leaves a character incomplete adds no text, and the token that completes it adds all of it.

    skip_special, spaces_between: how the engine decodes special tokens of this answer.
    """

    def __init__(self, tokenizer: Any, *, skip_special: bool, spaces_between: bool):
        self._tokenizer, self._skip_special, self._spaces_between = tokenizer, skip_special, spaces_between
        # The last decoded tokens: the spelling of a word depends on the one before it.
        self._ids: list[int] = []
        self._read, self._context = 0, ""
        self._texts: deque[str] = deque()  # of tokens with text that the engine has not sent yet
        self._pending = ""
        self._begun = False

    def add(self, text: str, ids: Sequence[int], *, finished: bool = False) -> list[str]:
        """Return the texts of the tokens that are complete now.

        text, ids: new ones; some of either may come with the next call. finished: the answer ends; the last item is
        then the rest of the text, often "". All items together are the whole text.
        """
        for token in ids:
            self._decode(token)
        self._pending += text
        cuts = []
        while self._texts and (length := self._length()) is not None:
            self._texts.popleft()
            cuts.append(self._pending[:length])
            self._pending = self._pending[length:]
            self._begun = True
        if finished:
            cuts.append(self._pending)
            self._pending = ""
        return cuts

    def _decode(self, token: int) -> None:
        self._ids.append(token)
        new = self._text_of(self._ids)[len(self._context) :]
        if new and not new.endswith(INCOMPLETE):
            self._texts.append(new)
            self._ids = self._ids[self._read :]
            self._read, self._context = len(self._ids), self._text_of(self._ids)

    def _length(self) -> int | None:
        """Return the characters of the pending text that belong to its first token; None if some are missing."""
        text = self._texts[0]
        if not self._begun and not self._pending.startswith(text):
            # A decoder that does not see the prompt may leave out the space before the first word.
            if self._pending[1:].startswith(text):
                return len(text) + 1
            if len(self._pending) <= len(text):
                return None
        return len(text) if len(text) <= len(self._pending) else None

    def _text_of(self, ids: Sequence[int]) -> str:
        if not getattr(self._tokenizer, "is_fast", False):
            return decode_without_hf_kwargs(self._tokenizer, list(ids), self._skip_special)
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=self._skip_special, spaces_between_special_tokens=self._spaces_between
        )
