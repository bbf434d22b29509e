"""Requests of other APIs than chat completions: each becomes a chat or a completion, and passes the checks of that."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from ..errors import ApiError, unsupported
from .protocol import Kind, unknown_field


@dataclass(frozen=True, slots=True)
class Translated:
    """A request as another kind of request.

    body: its fields. places: where each of its messages stood, for errors.
    """

    kind: Kind
    body: dict[str, Any]
    places: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """Another API.

    model: describes its own fields. passed: further fields, which mean what they mean in a chat. unsupported: fields
    of the API that are refused, with the reason. names: of chat fields that are called otherwise here, for errors.
    translate: raises ApiError for a body that it cannot translate. ids: bodies may hold token ids.
    """

    model: type[BaseModel]
    passed: frozenset[str]
    translate: Callable[[dict[str, Any]], Translated]
    names: Mapping[str, str]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    ids: bool = False

    def given_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """The fields of a body that are not null; raises ApiError for any that is not taken."""
        known = self.model.model_fields.keys() | self.passed
        for name, value in body.items():
            if name in known or (value is None and name in self.unsupported):
                continue
            if name in self.unsupported:
                raise unsupported(name, f"this server does not support {name!r}: {self.unsupported[name]}")
            raise unknown_field(name, name, known)
        return {name: value for name, value in body.items() if value is not None}

    def renamed(self, error: ApiError, places: Sequence[str]) -> ApiError:
        """The error of a translated request, with the names and places of the request that came."""

        def place(found: re.Match[str]) -> str:
            index = int(found[1])
            return places[index] if index < len(places) else found[0]

        message, param = error.message, error.param
        if places:
            message = re.sub(r"\bmessages\[(\d+)\][^' ]*", place, message)
            param = param and re.sub(r"^messages\[(\d+)\].*", place, param)
        for chat, own in self.names.items():
            message = re.sub(rf"'{re.escape(chat)}(?=['.\[])", f"'{own}", message)
            param = param and re.sub(rf"^{re.escape(chat)}(?=[.\[]|$)", own, param)
        return ApiError(message, status=error.status, param=param, code=error.code, retry_after=error.retry_after)
