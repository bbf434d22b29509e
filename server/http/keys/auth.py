"""Authenticate every request: check the key and its limits, and report the rest of the limits in headers."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import request_middleware
from ..errors import ApiError
from ..lifecycle import Lifecycle
from ..metrics import KeyMetrics
from ..request_middleware import once_whole
from . import admission
from .access import Access, KeyUsage

OPEN_PATHS = frozenset({"/health", "/ready", "/", "/docs", "/openapi.json"})
"""Routes without a key: probes and browsers that open a page send none. /openapi.json reveals only the version."""
OPEN_FOLDER = "/page/"
ADMIN_PATHS = frozenset({"/outrider/tune", "/load_lora_adapter", "/unload_lora_adapter"})
"""Routes that need an administrator's key."""


@dataclass(eq=False)
class AuthMiddleware:
    """Plain ASGI middleware, so that streams and disconnects pass unbuffered."""

    app: ASGIApp
    access: Access
    lifecycle: Lifecycle
    usage: KeyMetrics | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            key_usage = self._key_usage(scope)
            send = _with_limit_headers(key_usage, send)
            if scope["method"] == "POST":
                # A key's concurrency counts arriving requests too: incomplete ones take places of their key alone.
                with self._admitted(key_usage), contextlib.ExitStack() as under_way:
                    whole = once_whole(receive, lambda: under_way.enter_context(self.lifecycle.request()))
                    await self.app(scope, whole, send)
            else:
                await self.app(scope, receive, send)
        except ApiError as refusal:  # raised here; routes answer their own
            await refusal.response()(scope, receive, send)

    @contextlib.contextmanager
    def _admitted(self, key_usage: KeyUsage | None) -> Iterator[None]:
        """Hold the request's place; its tokens are logged at the end and counted when the engine is done with it."""
        if key_usage is not None and self.usage is not None:
            self.usage.count_request(key_usage.key.name)
        with admission.admitted(key_usage) as admitted:
            if key_usage is not None and self.usage is not None:
                admitted.on_released.append(self.usage.count_tokens)
            try:
                yield
            finally:
                if (context := request_middleware.current()) is not None:
                    context.fields |= admitted.tokens.fields()

    def _key_usage(self, scope: Scope) -> KeyUsage | None:
        """Return the usage of the request's key; None if none is needed. Raises ApiError for a wrong or missing key."""
        if self.access.open or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER):
            return None
        headers = dict(reversed(scope["headers"]))  # the first of each name
        header = headers.get(b"authorization", b"")
        if not header and (key := headers.get(b"x-api-key")):  # Anthropic's clients
            header = b"Bearer " + key
        key_usage = self.access.key_usage(header)
        if key_usage is None:
            raise ApiError(
                "wrong or missing API key; send 'Authorization: Bearer KEY' or 'x-api-key: KEY' "
                "(only /health, /ready and the page at / need none)",
                status=401,
                code="invalid_api_key",
            )
        if scope["path"] in ADMIN_PATHS and not key_usage.key.admin:
            raise ApiError(
                f"{scope['path']} is for administrators; key {key_usage.key.name} is not one's",
                status=403,
                code="admin_key_required",
            )
        if (context := request_middleware.current()) is not None:
            context.fields["key"] = key_usage.key.name
        return key_usage


def _with_limit_headers(key_usage: KeyUsage | None, send: Send) -> Send:
    """Add headers with the rest of the key's limits."""
    if key_usage is None:
        return send

    async def with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *key_usage.headers()]
        await send(message)

    return with_limits
