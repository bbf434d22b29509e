"""Text that a grammar forces, as tokens to draft.

A grammar often allows one continuation: names of properties, punctuation, the rest of a word of an enumeration. The
target may split it into other tokens, so it is verified like every draft. In JSON white space is free almost
everywhere; it is drafted in the answer's own style (`JsonStyle`) if only one token of JSON may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from xgrammar import TokenizerInfo

from .budget import GrammarBudget
from .json_style import JsonStyle

MOST_CHARACTERS = 96
"""Characters that are drafted at once."""
TAIL = 6
"""Tokens before the text with which it is encoded."""
FIRST_CHARACTERS = '":,{}[]tfn-01'
"""First characters of all tokens of JSON. 0 and 1 represent digits: few schemas refuse both."""
KEPT, PRIOR = 0.9, 4.0
"""Weight that a counted token keeps, and weight of the first guesses."""
FIRST_GUESSES = (0.95, 0.75), (0.98, 0.95)
"""Chances that a draft's first token is accepted, and each later one, without and with guessed white space up to it.
Most drafts are wrong at once or not at all."""


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


class Forced(NamedTuple):
    """Forced tokens. chances: each token's chance of acceptance if all tokens before it are accepted."""

    tokens: list[int]
    chances: list[float]


class ForcedText:
    """The forced text of one answer. style: of its JSON; None: it has none. spelling: of the tokenizer.

    budget: processor time that drafting takes. A grammar that exceeds it is not drafted for any more.
    """

    def __init__(self, spelling: Spelling, style: JsonStyle | None = None):
        self.spelling, self.style, self.budget = spelling, style, GrammarBudget()
        self._read = 0
        self._draft: list[int] = []
        self._guessed: list[bool] = []
        self._counts = [[[guess * PRIOR, PRIOR] for guess in guesses] for guesses in FIRST_GUESSES]  # accepted, seen

    def anew(self) -> ForcedText:
        """Return the same for another answer."""
        return ForcedText(self.spelling, None if self.style is None else JsonStyle(tagged=self.style.tagged))

    def read(self, accepted: Sequence[int]) -> None:
        """Read the answer's tokens so far, and count which of the last draft's were right."""
        new = accepted[self._read :]
        for place, (token, drafted, guessed) in enumerate(zip(new, self._draft, self._guessed, strict=False)):
            counts = self._counts[place > 0][guessed]
            counts[0], counts[1] = KEPT * counts[0] + (token == drafted), KEPT * counts[1] + 1
            if token != drafted:
                break
        self._draft, self._read = [], len(accepted)
        if self.style is not None:
            self.style.read(self.spelling.text(new))

    def tokens(self, matcher: Any, accepted: Sequence[int], most: int) -> Forced:
        """Return up to `most` tokens that the grammar forces after `accepted`. matcher: xgrammar's, left unchanged."""
        self.read(accepted)
        if self.style is not None and self.style.in_string and not _forced(matcher):
            return Forced([], [])  # most tokens are in strings, and a fork takes time
        style = None if self.style is None else self.style.copy()
        text, sure = self._text(matcher.fork(), style, accepted)
        self._draft, self._guessed = self._spelled(accepted, text, sure, most)
        return Forced(self._draft, self._chances(self._guessed))

    def after(self, matcher: Any, accepted: Sequence[int], draft: Sequence[int], most: int) -> tuple[int, Forced]:
        """Return how many tokens of a draft the grammar allows, and up to `most` tokens that it forces after them. Call
        `tokens` first."""
        matcher, style = matcher.fork(), None if self.style is None else self.style.copy()
        allowed = next((place for place, token in enumerate(draft) if not matcher.accept_token(token)), len(draft))
        if style is not None:
            style.read(self.spelling.text(draft[:allowed]), learn=False)
        before = [*accepted[-TAIL:], *draft[:allowed]]
        if most <= 0 or matcher.is_terminated():
            return allowed, Forced([], [])
        tokens, guessed = self._spelled(before, *self._text(matcher, style, before), most)
        return allowed, Forced(tokens, self._chances(guessed))

    def _spelled(self, before: Sequence[int], text: str, sure: int, most: int) -> tuple[list[int], list[bool]]:
        """Return the tokens of a text, and which come after a guess. sure: bytes before the first guess."""
        tokens = self.spelling.after(before, text)[0][:most] if text else []
        ends = accumulate(len(self.spelling.vocabulary[token]) for token in tokens)
        return tokens, [end > sure for end in ends]

    def _chances(self, guessed: Sequence[bool]) -> list[float]:
        return [accepted / seen for accepted, seen in (self._counts[i > 0][each] for i, each in enumerate(guessed))]

    def _text(self, matcher: Any, style: JsonStyle | None, before: Sequence[int]) -> tuple[str, int]:
        """Return forced text after the tokens `before`, and its bytes before the first guess. Advances matcher and
        style over the text."""
        text, sure = "", -1
        while len(text) < MOST_CHARACTERS and not matcher.is_terminated():
            if not (forced := _forced(matcher)):
                if style is None or style.in_string or style.outside:
                    break
                if (next_token := self._next(matcher, style, before, first=not text)) is None:
                    break
                forced, sure = next_token, len(text.encode()) if sure < 0 else sure
            if not matcher.accept_string(forced):
                break
            if style is not None:
                style.read(forced, learn=False)
            text += forced
        return text, len(text.encode()) if sure < 0 else sure

    def _next(self, matcher: Any, style: JsonStyle, before: Sequence[int], *, first: bool) -> str | None:
        """Return white space and the first character of the next token of JSON, if only one is possible."""
        allowed, probe = "", matcher.fork()
        for char in FIRST_CHARACTERS:
            if probe.accept_string(char):
                allowed, probe = allowed + char, matcher.fork()
                if len(allowed) > 1:
                    return None
        if not allowed:
            return None
        char, guess = allowed, style.guess(allowed)
        more = guess[len(style.pending) :] if guess.startswith(style.pending) else ""
        if first and style.pending:  # choose the rest with which the tokenizer keeps the last token
            likely = (more, " ", "")
            more = next((space for space in likely if self.spelling.after(before, space + char)[1]), more)
        return more + char if not more or matcher.fork().accept_string(more + char) else char


def _forced(matcher: Any) -> str:
    """Return text that xgrammar's matcher forces; "" for none, or if it ends or begins within a character."""
    try:
        return str(matcher.find_jump_forward_string())
    except UnicodeDecodeError:
        return ""
