"""Tokens of text, as the tokenizer and the target write it.

A grammar's mask allows every split of forced text into tokens. A target that does not expect the text often splits it
otherwise than the tokenizer, such as `full` into `f`, `ul` and `l`, and so again where the text comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xgrammar import TokenizerInfo

TAIL = 6
"""Tokens before the text with which it is encoded."""
KNOWN_BYTES, MOST_KNOWN = 16, 4096
"""Most bytes of forced text on which the target's next token depends, and texts that are remembered."""


class Spelling:
    """Tokens of text. encode: tokens of a text, without special ones. vocabulary: bytes of each token."""

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: Sequence[bytes]):
        self.encode, self.vocabulary = encode, vocabulary

    @classmethod
    def of(cls, tokenizer: Any, info: TokenizerInfo) -> Spelling:
        """Return the spelling of a Hugging Face tokenizer. info: xgrammar's view of it."""
        fast = getattr(tokenizer, "backend_tokenizer", None)
        encode = tokenizer.encode if fast is None else lambda text, **flags: fast.encode(text, **flags).ids
        return cls(lambda text: list(encode(text, add_special_tokens=False)), info.decoded_vocab)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, a character for each byte: JSON's punctuation is no part of other characters."""
        return b"".join(self.vocabulary[token] for token in tokens).decode("latin-1")

    def after(self, tokens: Sequence[int], text: str) -> tuple[list[int], bool]:
        """Return the tokens of `text` after `tokens`, and whether the tokenizer keeps `tokens` as they are."""
        known = list(tokens[-TAIL:])
        try:
            before = b"".join(self.vocabulary[token] for token in known).decode()
        except UnicodeDecodeError:  # the tail begins within a character
            return self.encode(text), True
        whole = self.encode(before + text)
        if whole[: len(known)] != known:
            known = self.encode(before)
        if whole[: len(known)] == known:
            return whole[len(known) :], True
        return self.encode(text), False


class Written:
    """The target's tokens of forced texts, each by the text from its beginning on."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling, self._tokens = spelling, dict[bytes, int]()

    def next(self, text: bytes) -> int | None:
        """Return the token with which the target began such a text; None: it never did."""
        return self._tokens.get(_beginning(text))

    def learn(self, text: bytes, tokens: Sequence[int]) -> None:
        """Remember tokens that write the text, up to the first one that does not or that goes beyond it."""
        for token in tokens:
            piece = self.spelling.vocabulary[token]
            if not piece or not text.startswith(piece):
                break
            if len(self._tokens) >= MOST_KNOWN:
                self._tokens.clear()
            self._tokens[_beginning(text)] = token
            text = text[len(piece) :]

    def spell(self, before: Sequence[int], text: str, most: int) -> tuple[list[int], list[bool]]:
        """Return up to `most` tokens of a text after the tokens `before`: the target's, the tokenizer's where it never
        wrote such a text; and which are the target's."""
        tokens: list[int] = []
        known: list[bool] = []
        rest: list[int] = []
        left = text.encode()
        while left and len(tokens) < most:
            if (token := self.next(left)) is None:
                try:
                    rest = rest or self.spelling.after([*before[-TAIL:], *tokens], left.decode())[0]
                except UnicodeDecodeError:  # the target's token ends within a character
                    break
                if not rest:
                    break
                known.append(False)
                token = rest.pop(0)
            else:
                known.append(True)
                rest = rest[1:] if rest[:1] == [token] else []
            tokens.append(token)
            piece = self.spelling.vocabulary[token]
            if not left.startswith(piece):  # the tokenizer writes another text
                break
            left = left[len(piece) :]
        return tokens, known


def _beginning(text: bytes) -> bytes:
    """Return the text up to the end of a name in JSON, or `KNOWN_BYTES`."""
    return text[: text.find(b'"', 1, KNOWN_BYTES) + 1 or KNOWN_BYTES]
