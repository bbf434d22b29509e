"""Text that a grammar forces, as tokens to draft.

A grammar often allows one continuation: names of properties, punctuation, the rest of a word of an enumeration. The
target may split it into other tokens (`Written`), so it is verified like every draft. In JSON white space is free
almost everywhere; it is drafted in the answer's own style (`JsonStyle`) if only one token of JSON may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from .budget import GrammarBudget
from .json_style import JsonStyle
from .spelling import TAIL, Spelling, Written

MOST_CHARACTERS = 96
"""Characters that are drafted at once."""
FIRST_CHARACTERS = '":,{}[]tfn-01'
"""First characters of all tokens of JSON. 0 and 1 represent digits: few schemas refuse both."""
KEPT, PRIOR = 0.9, 4.0
"""Weight that a counted token keeps, and weight of the first guesses."""
TOKENIZERS, GUESSED, TARGETS = range(3)
FIRST_GUESSES = (0.9, 0.75, 0.95), (0.95, 0.95, 0.98)
"""Chances that a draft's first token is accepted, and each later one: of the tokenizer's tokens, those after guessed
white space, and the target's earlier ones. Most drafts are wrong at once or not at all."""


class Forced(NamedTuple):
    """Forced tokens. chances: each token's chance of acceptance if all tokens before it are accepted."""

    tokens: list[int]
    chances: list[float]


class ForcedText:
    """The forced text of one answer. style: of its JSON; None: it has none. spelling: of the tokenizer.

    budget: processor time that drafting takes. A grammar that exceeds it is not drafted for any more.
    written: of all answers by the same grammar.
    """

    def __init__(self, spelling: Spelling, style: JsonStyle | None = None, written: Written | None = None):
        self.spelling, self.style, self.budget = spelling, style, GrammarBudget()
        self.written = written or Written(spelling)
        self._read = 0
        self._draft: list[int] = []
        self._kinds: list[int] = []
        self._texts: list[tuple[list[int], bytes]] = []  # forced texts of the last step, and drafts before each
        self._counts = [[[guess * PRIOR, PRIOR] for guess in guesses] for guesses in FIRST_GUESSES]  # accepted, seen

    def anew(self) -> ForcedText:
        """Return the same for another answer."""
        style = None if self.style is None else JsonStyle(tagged=self.style.tagged)
        return ForcedText(self.spelling, style, self.written)

    def read(self, accepted: Sequence[int]) -> None:
        """Read the answer's tokens so far, count which of the last draft's were right, and learn how the target writes
        the text."""
        new = list(accepted[self._read :])
        for place, (token, drafted, kind) in enumerate(zip(new, self._draft, self._kinds, strict=False)):
            counts = self._counts[place > 0][kind]
            counts[0], counts[1] = KEPT * counts[0] + (token == drafted), KEPT * counts[1] + 1
            if token != drafted:
                break
        for before, text in self._texts:
            if new[: len(before)] == before:
                self.written.learn(text, new[len(before) :])
        self._draft, self._texts, self._read = [], [], len(accepted)
        if self.style is not None:
            self.style.read(self.spelling.text(new))

    def tokens(self, matcher: Any, accepted: Sequence[int], most: int) -> Forced:
        """Return up to `most` tokens that the grammar forces after `accepted`. matcher: xgrammar's, left unchanged."""
        self.read(accepted)
        if self.style is not None and self.style.in_string and not _forced(matcher):
            return Forced([], [])  # most tokens are in strings, and a fork takes time
        style = None if self.style is None else self.style.copy()
        text, sure = self._text(matcher.fork(), style, accepted)
        self._texts.append(([], text.encode()))
        self._draft, self._kinds = self._spelled(accepted, text, sure, most)
        return Forced(self._draft, self._chances(self._kinds))

    def after(self, matcher: Any, accepted: Sequence[int], draft: list[int], most: int) -> tuple[int, Forced]:
        """Return how many tokens of a draft to keep: those that the grammar allows and with which the target writes
        forced text; and tokens that the grammar forces after them, up to `most` in all. Call `tokens` first."""
        matcher, style = matcher.fork(), None if self.style is None else self.style.copy()
        allowed = self._allowed(matcher, draft)
        if style is not None:
            style.read(self.spelling.text(draft[:allowed]), learn=False)
        before = [*accepted[-TAIL:], *draft[:allowed]]
        if allowed >= most or matcher.is_terminated():
            return allowed, Forced([], [])
        text, sure = self._text(matcher, style, before)
        self._texts.append((draft[:allowed], text.encode()))
        tokens, kinds = self._spelled(before, text, sure, most - allowed)
        return allowed, Forced(tokens, self._chances(kinds))

    def _allowed(self, matcher: Any, draft: list[int]) -> int:
        """Advance the matcher over the tokens to keep, and return their number."""
        within = False
        for place, token in enumerate(draft):
            if matcher.is_terminated():
                return place
            if text := _forced(matcher).encode():
                if not within:
                    self._texts.append((draft[:place], text))
                if self.written.next(text) not in (None, token):
                    return place
            within = bool(text)
            if not matcher.accept_token(token):
                return place
        return len(draft)

    def _spelled(self, before: Sequence[int], text: str, sure: int, most: int) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and the kind of each. sure: bytes before the first guess."""
        tokens, known = self.written.spell(before, text, most)
        ends = accumulate(len(self.spelling.vocabulary[token]) for token in tokens)
        kinds = [TARGETS if k else GUESSED if end > sure else TOKENIZERS for k, end in zip(known, ends, strict=True)]
        return tokens, kinds

    def _chances(self, kinds: Sequence[int]) -> list[float]:
        return [accepted / seen for accepted, seen in (self._counts[i > 0][each] for i, each in enumerate(kinds))]

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
