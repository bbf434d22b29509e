"""What every request passes on its way in: asks for the key, and counts."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.http import openapi
from outrider.server.http.errors import ApiError
from outrider.server.http.lifecycle import Lifecycle
from outrider.server.http.metrics import HttpMetrics

# Probes carry no key, nor do browsers that open a page.
OPEN_PATHS = frozenset({"/health", "/ready"}) | openapi.PATHS


class Gate:
    """Plain ASGI, so that streams and disconnects pass unbuffered."""

    def __init__(self, app: ASGIApp, api_key: str | None, lifecycle: Lifecycle, metrics: HttpMetrics) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode() if api_key else None
        self.lifecycle = lifecycle
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if not self._allowed(scope):
            refusal = ApiError(
                "wrong or missing API key; send 'Authorization: Bearer KEY' (only /health and /ready need none)",
                status=401,
                code="invalid_api_key",
            )
            await refusal.response()(scope, receive, send)
            self.metrics.finished(path, 401)
            return
        status = 500

        async def watching_send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["method"] == "POST":
                async with self.lifecycle.request():
                    await self.app(scope, receive, watching_send)
            else:
                await self.app(scope, receive, watching_send)
        finally:
            self.metrics.finished(path, status)

    def _allowed(self, scope: Scope) -> bool:
        if self.expected is None or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        # In constant time, so that a wrong key tells nothing about the right one.
        return hmac.compare_digest(given, self.expected)
