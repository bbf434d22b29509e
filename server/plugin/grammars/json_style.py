"""The white space of a JSON answer, so that the next one can be guessed.

An answer has one style: compact, or a new line and an indentation for each member. The target verifies each guess.
"""

from __future__ import annotations

from copy import copy

WHITE_SPACE = " \n\t\r"
OPENING, CLOSING = "{[", "}]"
INDENTATION = "  "
"""White space of each level, until the answer shows its own."""


class JsonStyle:
    """Reads an answer and remembers the white space between two tokens of JSON, by their kinds and depth.

    tagged: the JSON is in other text, as in tool calls.
    pending: white space after the last token of JSON. in_string: the text ends within a string.
    """

    __slots__ = ("_after", "_before", "_depth", "_escaped", "_unit", "in_string", "pending", "tagged")

    def __init__(self, *, tagged: bool = False) -> None:
        self.pending, self.in_string, self.tagged = "", False, tagged
        self._before = ""  # the last token of JSON: "{", "[", ",", ":", or "v" of a value, "" at the beginning
        self._depth, self._escaped, self._unit = 0, False, INDENTATION
        self._after: dict[tuple[str, str, int], str] = {}

    @property
    def outside(self) -> bool:
        """True if the text ends outside of JSON."""
        return self.tagged and not self._depth

    def copy(self) -> JsonStyle:
        """Return a style with its own position that shares the learned white space."""
        return copy(self)

    def read(self, text: str, *, learn: bool = True) -> None:
        for char in text:
            if self.in_string:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == '"':
                    self.in_string = False
            elif self.outside and char != "{":
                continue
            elif char in WHITE_SPACE:
                self.pending += char
            else:
                self._token(char, learn)

    def _token(self, char: str, learn: bool) -> None:
        """Read the next character of a token of JSON."""
        kind, depth = _kind(char), self._depth - (char in CLOSING)
        if learn and self._before and (kind != "v" or self._before != "v"):
            self._after[self._before, kind, depth] = self.pending
            if "\n" in self.pending and depth > 0:
                line = self.pending.rpartition("\n")[2]
                self._unit = line[: len(line) // depth]
        self._depth = depth + (char in OPENING)
        self.in_string, self.pending = char == '"', ""
        self._before = char if char in "{[,:" else "v"

    def guess(self, char: str) -> str:
        """Return white space between the last token of JSON and `char`, the first character of the next one."""
        kind, depth = _kind(char), self._depth - (char in CLOSING)
        if (known := self._after.get((self._before, kind, depth))) is not None:
            return known
        if kind == ":" or not self._before:
            return ""
        if self._before == ":":
            return next((space for (before, _, _), space in self._after.items() if before == ":"), " ")
        alike = [space for (before, after, _), space in self._after.items() if before == self._before and after == kind]
        if not alike and (self._before != "v" or kind == "]"):
            alike = [space for (before, _, _), space in self._after.items() if before in "{[,"]
        if not alike:
            return self._indented(depth) if self._before == "{" else ""
        return self._indented(depth) if "\n" in alike[-1] else alike[-1]

    def _indented(self, depth: int) -> str:
        return "\n" + self._unit * depth


def _kind(char: str) -> str:
    return "]" if char in CLOSING else char if char in ":," else "v"
