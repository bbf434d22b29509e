"""Translate answers to chats for other APIs. One writer makes streamed and whole answers, so they agree."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic_core import to_json

from .. import offload
from ..requests.dialect import Dialect
from ..requests.json_body import SMALL_BYTES
from .blocks import Blocks, BlockStep

Event = dict[str, Any]


@dataclass(slots=True)
class End:
    """The end of an answer. matched: the stop string or token. extra: our own fields of a chat's answer."""

    reason: str | None = None
    matched: str | int | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class Writer(Protocol):
    """Writes one answer of another API. begins_with_usage: its first event has the number of prompt tokens."""

    begins_with_usage: bool

    def begin(self, chat: dict[str, Any]) -> Iterable[Event]:
        """Return the first events. chat: a chat's chunk, or a whole answer."""

    def step(self, step: BlockStep) -> Iterable[Event]: ...

    def end(self, end: End) -> Iterable[Event]: ...

    def whole(self) -> dict[str, Any]:
        """Return the answer, after its end."""

    def failed(self, error: dict[str, Any]) -> Event:
        """Return the last event of a stream that failed. error: a chat's."""


async def translated(answer: Response, writer: Writer, dialect: Dialect) -> Response:
    """Return the answer to a chat as the writer writes it. Errors name the dialect's fields."""
    if isinstance(answer, StreamingResponse):
        answer.body_iterator = _stream(answer.body_iterator, writer)
        return answer
    if answer.status_code >= 400:
        error = orjson.loads(answer.body)["error"]
        error["message"], error["param"] = dialect.renamed(error["message"], error["param"])
        headers = {name: value for name, value in answer.headers.items() if name != "content-length"}
        return JSONResponse({"error": error}, answer.status_code, headers)
    data = bytes(answer.body)
    size = len(data)
    body = await offload.run(size, _whole, data, writer) if size > SMALL_BYTES else _whole(data, writer)
    return Response(body, media_type="application/json")


def _whole(data: bytes, writer: Writer) -> bytes:
    translation = _Translation(writer)
    for _ in (*translation.add(orjson.loads(data)), *translation.end()):
        pass  # the writer keeps the answer
    return to_json(writer.whole() | translation.trace())


async def _stream(chunks: Any, writer: Writer) -> AsyncIterator[bytes]:
    translation = _Translation(writer)
    async with aclosing(chunks):
        async for chunk in chunks:
            if not chunk.startswith("data: {"):
                continue
            body = orjson.loads(chunk.removeprefix("data: "))
            if (error := body.get("error")) is not None:
                yield _sse(writer.failed(error))
                return
            for event in translation.add(body):
                yield _sse(event | translation.trace())
    for event in translation.end():
        yield _sse(event | translation.trace())


def _sse(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))


class _Translation:
    """Reads a chat's answer piece by piece, and has the writer write it."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._blocks, self._end = Blocks(), End()
        self._begun = False
        self._trace: list[dict[str, Any]] = []

    def add(self, chat: dict[str, Any]) -> Iterator[Event]:
        """Add a chat's chunk, or a whole answer."""
        self._end.usage = chat.get("usage") or self._end.usage
        if "metrics" in chat:
            self._end.extra["metrics"] = chat["metrics"]
        if not self._begun and (self._end.usage or not self._writer.begins_with_usage):  # the first chunk has none
            self._begun = True
            yield from self._writer.begin(chat)
        for choice in chat["choices"]:
            self._trace += (choice.get("speculation") or {}).get("trace", ())
            for step in self._blocks.add(choice.get("delta") or choice.get("message") or {}, choice.get("logprobs")):
                yield from self._writer.step(step)
            if choice.get("finish_reason"):
                self._end.reason, self._end.matched = choice["finish_reason"], choice.get("matched_stop")

    def end(self) -> Iterator[Event]:
        for step in self._blocks.end(cut=self._end.reason == "length"):
            yield from self._writer.step(step)
        yield from self._writer.end(self._end)

    def trace(self) -> dict[str, Any]:
        """Return the sources of the tokens since the last call; {} if the request does not want them."""
        trace, self._trace = self._trace, []
        return {"speculation": {"trace": trace}} if trace else {}
