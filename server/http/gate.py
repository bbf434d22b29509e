"""Authentication of every request: it checks the key and its limits, and answers with what is left of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import admission, openapi, watch
from .access import Access, Holder
from .errors import ApiError
from .key_metrics import KeyMetrics
from .lifecycle import Lifecycle
from .received import once_whole

# Probes carry no key, nor do browsers that open a page.
OPEN_PATHS = frozenset({"/health", "/ready", "/"}) | openapi.PATHS
OPEN_FOLDER = "/page/"
ADMIN_PATHS = frozenset({"/outrider/tune"})


class Gate:
    """Plain ASGI, so that streams and disconnects pass unbuffered."""

    def __init__(self, app: ASGIApp, access: Access, lifecycle: Lifecycle, usage: KeyMetrics | None = None) -> None:
        self.app = app
        self.usage = usage
        self.access = access
        self.lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            holder = self._holder(scope)
            send = _telling(holder, send)
            if scope["method"] == "POST":
                # A key's concurrency counts requests that are still received: what never comes whole takes places of
                # its own key, and nothing of others.
                with self._admitted(holder), contextlib.ExitStack() as under_way:
                    whole = once_whole(receive, lambda: under_way.enter_context(self.lifecycle.request()))
                    await self.app(scope, whole, send)
            else:
                await self.app(scope, receive, send)
        except ApiError as refusal:  # ours: those of the routes are answered there
            await refusal.response()(scope, receive, send)

    @contextlib.contextmanager
    def _admitted(self, holder: Holder | None) -> Iterator[None]:
        """Hold a key's place until the answer ends; its tokens are logged, and counted when the engine lets go."""
        if holder is not None and self.usage is not None:
            self.usage.asked(holder.key.name)
        with admission.admitted(holder) as asking:
            if holder is not None and self.usage is not None:
                asking.at_last.append(self.usage.used)
            try:
                yield
            finally:
                if (watched := watch.current()) is not None:
                    watched.fields |= asking.tokens.fields()

    def _holder(self, scope: Scope) -> Holder | None:
        """Whose request it is, None where no key is asked for; raises ApiError."""
        if self.access.open or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDER):
            return None
        holder = self.access.holder(_header(scope, b"authorization"))
        if holder is None:
            raise ApiError(
                "wrong or missing API key; send 'Authorization: Bearer KEY' "
                "(only /health, /ready and the page at / need none)",
                status=401,
                code="invalid_api_key",
            )
        if scope["path"] in ADMIN_PATHS and not holder.key.admin:
            raise ApiError(
                f"{scope['path']} is for administrators; key {holder.key.name} is not one's",
                status=403,
                code="admin_key_required",
            )
        if (watched := watch.current()) is not None:
            watched.fields["key"] = holder.key.name
        return holder


def _telling(holder: Holder | None, send: Send) -> Send:
    """Have the answer say what the key has left of its limits."""
    if holder is None:
        return send

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *holder.headers()]
        await send(message)

    return telling


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
