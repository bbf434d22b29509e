"""A request's body as JSON: count its values before parsing, then parse it.

The parser holds Python's interpreter lock while it runs, in a thread too, so every stream of the server waits for it.
10 MB take it up to 30 ms, or 0.2 s if they are token ids. Bodies that would take longer are refused as they arrive.
"""

from typing import Any

import pydantic_core

from ..errors import ApiError

SMALL_BYTES = 4096
"""A body up to this size is prepared on the event loop: it takes less time than a change of threads."""

MAX_CONTAINERS = 16_384
"""Objects and arrays of a body: 2,048 messages of two parts and a tool call each."""
MAX_STRINGS = 65_536
"""Keys of objects included."""

_SLICE = 65_536
_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


class Meter:
    """Counts a body's values while it arrives, up to the first byte that is no JSON.

    numbers: most numbers in a body, estimated from commas.
    """

    def __init__(self, numbers: int) -> None:
        self._max_commas = MAX_CONTAINERS + MAX_STRINGS + numbers
        self.containers = self.strings = self.commas = 0
        self._rest = b""
        self._inside = False  # a string

    def feed(self, chunk: bytes) -> None:
        """Count a piece; raises ApiError as soon as there is too much."""
        for start in range(0, len(chunk), _SLICE):
            self._count(self._rest + chunk[start : start + _SLICE])
            self._refuse_too_much()

    def _count(self, data: bytes) -> None:
        # A last backslash escapes the first byte of the next piece: keep it until then.
        odd = (len(data) - len(data.rstrip(b"\\"))) % 2
        self._rest = data[len(data) - odd :]
        data = data[: len(data) - odd]
        if b"\\" in data:
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = data.split(b'"')
        outside = b"".join(pieces[self._inside :: 2])
        self.strings += (len(pieces) - self._inside) // 2
        self._inside ^= len(pieces) % 2 == 0
        self.containers += outside.count(b"{") + outside.count(b"[")
        self.commas += outside.count(b",")

    def _refuse_too_much(self) -> None:
        for amount, most, what in (
            (self.containers, MAX_CONTAINERS, "objects and arrays"),
            (self.strings, MAX_STRINGS, "strings and keys"),
            (self.commas, self._max_commas, "values"),
        ):
            if amount > most:
                raise ApiError(f"the body has more than {most} {what}", code="body_too_complex")


def decode(data: bytes) -> dict[str, Any]:
    """Return the object in a body. Raises ApiError for anything else."""
    try:
        body = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not valid {_reason(data, error)}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(f"the body is {name_of(body)}; it has to be an object", code="invalid_json")
    return body


def _reason(data: bytes, error: ValueError) -> str:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as undecodable:
        return f"UTF-8 at byte {undecodable.start}"
    return f"JSON: {error}"


def name_of(value: Any) -> str:
    """Return the name of a JSON value's type, for an error message."""
    if isinstance(value, str):
        return repr(value) if len(value) < 40 else "a string"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return clipped(value)
    return _NAMES.get(type(value), "something else")


def clipped(value: object, most: int = 64) -> str:
    """Return a client's value for an error message: as Python writes it, cut to `most` characters."""
    if isinstance(value, (str, list, dict)):
        value = value[: most + 1] if isinstance(value, str) else name_of(value)
    shown = repr(value) if isinstance(value, str) else str(value)
    return shown if len(shown) <= most + 2 else shown[:most] + "…"
