"""What every request passes on its way in: asks for the key."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.http import openapi
from outrider.server.http.errors import ApiError
from outrider.server.http.lifecycle import Lifecycle

# Probes carry no key, nor do browsers that open a page.
OPEN_PATHS = frozenset({"/health", "/ready", "/"}) | openapi.PATHS
OPEN_FOLDER = "/page/"


class Gate:
    """Plain ASGI, so that streams and disconnects pass unbuffered."""

    def __init__(self, app: ASGIApp, api_key: str | None, lifecycle: Lifecycle) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode() if api_key else None
        self.lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if not self._allowed(scope):
            refusal = ApiError(
                "wrong or missing API key; send 'Authorization: Bearer KEY' "
                "(only /health, /ready and the page at / need none)",
                status=401,
                code="invalid_api_key",
            )
            await refusal.response()(scope, receive, send)
        elif scope["method"] == "POST":
            async with self.lifecycle.request():
                await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if self.expected is None or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        # In constant time, so that a wrong key tells nothing about the right one.
        return hmac.compare_digest(given, self.expected)
