import asyncio
import json

from starlette.requests import Request

from outrider.server.http.requests import receive
from outrider.server.http.requests.dialect import Dialect
from outrider.server.http.requests.protocol import ChatRequest, Kind, TextRequest
from outrider.server.http.requests.validation import Limits


def raw_request(*chunks: bytes, **headers: str) -> Request:
    """A request as from an ASGI server, with the body in pieces."""
    names = {"content_type": "application/json"} | headers
    messages = iter(
        {"type": "http.request", "body": chunk, "more_body": more}
        for chunk, more in [*((chunk, True) for chunk in chunks), (b"", False)]
    )

    async def receive() -> dict[str, object]:
        return next(messages)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in names.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def received(form: Kind | Dialect, body: object, limits: Limits, **headers: str) -> ChatRequest | TextRequest:
    return asyncio.run(receive.receive(raw_request(json.dumps(body).encode(), **headers), form, limits))
