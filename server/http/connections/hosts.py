"""Check `Host` and `Origin`, so that foreign pages in a browser cannot use a server without a key.

If a page's name resolves to 127.0.0.1 (DNS rebinding), the browser takes the server for the page's origin and lets the
page read answers; `Host` then has the page's name. A page of another origin may send without reading; browsers name it
in `Origin`.
"""

import socket
from dataclasses import dataclass
from typing import Self

from starlette.types import ASGIApp, Receive, Scope, Send

from ...machine.host_names import address_of, canonical, host_of
from ...settings.settings import Settings
from ..errors import ApiError

ANY = "*"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SHOWN = 80
"""Characters of a foreign name that an error repeats."""


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """names: hosts that are allowed, on any port; None: all. origins: check `Origin` too."""

    names: frozenset[str] | None
    origins: bool

    @classmethod
    def of(cls, settings: Settings, listener: socket.socket, *, host: str, key_required: bool) -> Self:
        """Return the allowed hosts of a server at `host` with the socket `listener`.

        Without --allowed-hosts, a server that needs a key or that other machines can reach allows any host.
        """
        local = address_of(str(listener.getsockname()[0]))
        reached_from_here = local is not None and local.is_loopback
        named = frozenset(map(canonical, settings.allowed_hosts))
        if ANY in named or (not named and (key_required or not reached_from_here)):
            return cls(None, origins=False)
        return cls(named | LOOPBACK | {canonical(host)}, origins=not key_required)

    def check(self, scope: Scope) -> None:
        """Raise ApiError for a request to a foreign host, or of a foreign page.

        A request without `Host` (HTTP/1.0, some probes) comes from no browser. The connection's own address is allowed,
        because probes use it.
        """
        if self.names is None:
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host")
        if host is not None and not self._knows(host, scope):
            raise ApiError(
                f"this server is not {host[:SHOWN]!r}; --allowed-hosts names the hosts that it answers for",
                status=421,
                code="misdirected_request",
            )
        origin = headers.get(b"origin")
        if self.origins and origin is not None and not self._knows(origin.partition("://")[2], scope):
            raise ApiError(
                f"a page of {origin[:SHOWN]!r} may not ask this server; --allowed-hosts names the hosts that may",
                status=403,
                code="foreign_origin",
            )

    def _knows(self, authority: str, scope: Scope) -> bool:
        host = host_of(authority)
        if host is None or self.names is None:
            return False
        return host in self.names or (scope.get("server") is not None and host == canonical(scope["server"][0]))


@dataclass(eq=False)
class HostGuard:
    """Plain ASGI middleware around `AuthMiddleware`: foreign requests are refused before keys are checked."""

    app: ASGIApp
    hosts: AllowedHosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.hosts.check(scope)
            except ApiError as refusal:
                await refusal.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)
