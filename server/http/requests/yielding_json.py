"""Parse JSON without holding Python's interpreter lock for long: the standard library's parser in Python, which passes
long strings and long arrays of integers to its parts in C piece by piece.

For a thread next to an event loop. It is slower than a parser in C, but other threads run between its steps.
"""

from __future__ import annotations

import json
import json.decoder
import json.scanner
import re
import types
from collections.abc import Callable
from typing import Any

import pydantic_core

_TEXT = re.compile(
    r'(?:[^"\\]{1,4096}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}|\\[^u]){1,1024}', re.DOTALL
)
"""A part of a string that can be parsed alone: it ends neither in an escape nor between two surrogates."""
_INTEGERS = re.compile(r"(?:[ \t\r\n]*-?(?:0|[1-9][0-9]{0,17})[ \t\r\n]*,){16,4096}")
_SPACE = re.compile(r"[ \t\r\n]*")


def loads(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if malformed, RecursionError if nested too deeply."""
    return _DECODER.decode(text)


class _Decoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse_constant)
        self.parse_string = _string
        self.parse_array = _array
        self.parse_object = _OBJECT
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _string(text: str, end: int, strict: bool = True) -> tuple[str, int]:
    pieces = []
    while (piece := _TEXT.match(text, end)) is not None:
        pieces.append(json.decoder.scanstring(piece[0] + '"', 0, strict)[0])  # type: ignore[attr-defined]
        end = piece.end()
    rest, end = json.decoder.scanstring(text, end, strict)  # type: ignore[attr-defined]
    string = "".join([*pieces, rest])
    if not string.isascii():
        string.encode("utf-8")  # half a surrogate pair is no text
    return string, end


def _array(text_and_end: tuple[str, int], scan_once: Callable[[str, int], Any]) -> tuple[list[Any], int]:
    text, end = text_and_end
    items: list[Any] = []
    while (piece := _INTEGERS.match(text, end)) is not None:
        items += pydantic_core.from_json(f"[{piece[0][:-1]}]")
        end = piece.end()
    if items and text.startswith("]", _SPACE.match(text, end).end()):  # type: ignore[union-attr]
        raise json.JSONDecodeError("Expecting value", text, end)
    rest, end = json.decoder.JSONArray((text, end), scan_once)  # type: ignore[attr-defined]
    return (items + rest if items else rest), end


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


_OBJECT = types.FunctionType(
    json.decoder.JSONObject.__code__,  # type: ignore[attr-defined]
    vars(json.decoder) | {"scanstring": _string},
    argdefs=json.decoder.JSONObject.__defaults__,  # type: ignore[attr-defined]
)
"""The standard library's function, made to read keys with ours."""
_DECODER = _Decoder()
