"""Regular expressions as xgrammar follows them: of whole texts, and without anchors."""

import re

TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?<?[=!]|.", re.DOTALL)
UNSUPPORTED = re.compile(r"\\[AZzbBpPk1-9]|\(\?<?[=!]")
"""Tokens that xgrammar ignores, takes for letters or does not compile."""


def without_anchors(pattern: str) -> str:
    """Return the pattern without `^` before and `$` after each of its alternatives, which match whole texts anyway.
    Raises ValueError for an anchor anywhere else, which xgrammar would ignore, and for unsupported tokens."""
    tokens = TOKEN.findall(pattern)
    kept, depth = [], 0
    for index, token in enumerate(tokens):
        if UNSUPPORTED.fullmatch(token):
            raise ValueError(f"{token!r} in the pattern {pattern!r} is not supported")
        depth += token.startswith("(") - (token == ")")
        begins = index == 0 or tokens[index - 1] == "|"
        ends = index == len(tokens) - 1 or tokens[index + 1] == "|"
        if token not in ("^", "$"):
            kept.append(token)
        elif depth or not (begins if token == "^" else ends):
            raise ValueError(f"{token!r} stands inside the pattern {pattern!r}; anchor all of it, as in ^(?:a|b)$")
    return "".join(kept)
