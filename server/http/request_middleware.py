"""Outermost middleware: gives every request an id, counts and logs its end, and cancels it when its client leaves.

Plain ASGI, so that streams and disconnects pass unbuffered.
"""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..log_names import REQUESTS
from .metrics import ANSWERING_PATHS, HttpMetrics

logger = logging.getLogger(REQUESTS)

ID_HEADER = "X-Request-Id"
CLIENTS_ID = re.compile(rb"[!-~]{1,128}")
"""Ids accepted from clients. Any other is replaced, because ids appear in logs and answers."""
FOR_CLIENTS = ("/v1/", "/outrider/tune")
"""Prefixes of routes that are cancelled when their client leaves; a change of adapters is not."""
LEFT = 499
"""Status, in log and metrics, if the client left before the answer began; nginx uses the same."""
PROBES = frozenset({"/health", "/ready", "/metrics"})
"""Routes that are polled every few seconds; only their failures are logged."""


@dataclass(slots=True)
class RequestContext:
    """Data of a running request.

    error: status of the error that ended its stream. fields: further fields of its log line.
    """

    request_id: str
    error: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)


_current: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def current() -> RequestContext | None:
    """Return the request that the running code works for; None outside any."""
    return _current.get()


@dataclass(eq=False)
class RequestMiddleware:
    """Plain ASGI middleware around the whole app, including its error handling.

    log: write a line per request, to the logger `outrider.requests`.
    """

    app: ASGIApp
    metrics: HttpMetrics
    log: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = RequestContext(_request_id(scope))
        # The server's connection drops the body of an answer to HEAD.
        inner_scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        began, complete, left = time.monotonic(), False, False
        status: int | None = None

        async def watching_receive() -> Message:
            nonlocal left
            message = await whole_receive()
            if message["type"] == "http.disconnect" and not complete:
                left = True
            return message

        async def watching_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (ID_HEADER.lower().encode(), context.request_id.encode())]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                complete = True
            await send(message)

        async def end_when_left() -> None:
            await watching_receive()  # returns when the client of a whole request leaves, or its answer is complete
            if left:
                answering.cancel()

        def begin() -> None:
            if _answers(scope):
                in_flight.enter_context(self.metrics.in_flight())
            if scope["path"].startswith(FOR_CLIENTS):
                in_flight.callback(asyncio.create_task(end_when_left()).cancel)

        token = _current.set(context)
        try:
            # Cancels until the work ends, as Starlette's streams do: `asyncio.wait_for` may lose a single cancellation.
            with anyio.CancelScope() as answering, contextlib.ExitStack() as in_flight:
                whole_receive = once_whole(receive, begin)
                await self.app(inner_scope, watching_receive, watching_send)
        finally:
            status = status or (LEFT if left else 500)
            outcome = "cancelled" if left else outcome_of(status if status >= 400 else context.error or status)
            self._ended(scope, context, status, outcome, time.monotonic() - began)
            _current.reset(token)

    def _ended(self, scope: Scope, context: RequestContext, status: int, outcome: str, seconds: float) -> None:
        path = scope["path"]
        self.metrics.finished(path, status)
        if _answers(scope):
            self.metrics.ended(outcome, seconds)
        if self.log and not (path in PROBES and status < 400):
            fields = {"method": scope["method"], "path": quote(path), "status": status, "outcome": outcome}
            fields |= {"seconds": round(seconds, 4), "request_id": context.request_id, **context.fields}
            logger.info(" ".join(f"{name}={value}" for name, value in fields.items()), extra=fields)


def outcome_of(status: int) -> str:
    """Return one of `metrics.OUTCOMES`, for a client that waited for its answer."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "overloaded"
    if status < 400:
        return "completed"
    return "failed" if status >= 500 else "refused"


def name_requests_in_logs() -> None:
    """Add the request's id to every log record made for it; JSON lines show it."""

    def name(record: logging.LogRecord) -> bool:
        if (context := current()) is not None:
            record.request_id = context.request_id
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(name)


def _answers(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in ANSWERING_PATHS


def _request_id(scope: Scope) -> str:
    given = (value for name, value in scope["headers"] if name == ID_HEADER.lower().encode())
    return next((value.decode() for value in given if CLIENTS_ID.fullmatch(value)), None) or uuid.uuid4().hex


def once_whole(receive: Receive, begin: Callable[[], object]) -> Receive:
    """Return `receive` of an ASGI app that calls `begin` once, with a request's last byte.

    Until that byte a request costs the server only a connection, and may never be complete.
    """
    whole = False

    async def receiving() -> Message:
        nonlocal whole
        message = await receive()
        if not whole and message["type"] == "http.request" and not message.get("more_body"):
            whole = True
            begin()
        return message

    return receiving
