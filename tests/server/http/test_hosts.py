"""Checks of the names in Host and Origin."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses
from served_app import say_ok

from outrider.server.errors import UserError
from outrider.server.http.connections.hosts import AllowedHosts, HostGuard
from outrider.server.http.listen import Listeners, bind
from outrider.server.settings.settings import Settings

FOREIGN = (
    "evil.example", "evil.example:30000", "localhost.evil.example", "127.0.0.1.evil.example", "192.0.2.1", "[::2]",
)  # fmt: skip
OURS = ("localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:30000", "[::1]:30000", "[0:0:0:0:0:0:0:1]")
FOREIGN_PAGES = ("http://evil.example", "https://evil.example:30000", "null", "", "file://", "localhost")
OUR_PAGES = ("http://127.0.0.1:30000", "http://localhost:3000", "https://[::1]:8443")
BROKEN = (
    "", ":30000", "evil@localhost", "localhost/evil", "localhost evil", "[::1", "::1]:2", "localhost:port", "\xff",
)  # fmt: skip


def hosts(host: str = "127.0.0.1", **settings: Any) -> AllowedHosts:
    key_required = bool(settings.pop("key_required", False))
    with bind(host, 0) as listener:
        return AllowedHosts.of(
            Settings(device="cpu", host=host, **settings), listener, host=host, key_required=key_required
        )


def ask(
    policy: AllowedHosts, *, server: str = "127.0.0.1", path: str = "/v1/models", **headers: str
) -> tuple[int, str | None]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "headers": raw, "server": (server, 30000)}
    asyncio.run(HostGuard(say_ok, policy)(scope, None, send))
    start, body = sent
    return start["status"], None if start["status"] == 200 else json.loads(body["body"])["error"]["code"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(({"host": host}, 421) for host in FOREIGN + BROKEN),
        *(({"host": host}, 200) for host in OURS),
        ({}, 200),  # from no browser
        *(({"host": "127.0.0.1:30000", "origin": origin}, 403) for origin in FOREIGN_PAGES),
        *(({"host": "127.0.0.1:30000", "origin": origin}, 200) for origin in OUR_PAGES),
    ],
)
def test_a_server_on_loopback_checks_host_and_origin(headers: dict[str, str], status: int) -> None:
    code = {421: "misdirected_request", 403: "foreign_origin", 200: None}[status]
    assert ask(hosts(), **headers) == (status, code)


@pytest.mark.parametrize(
    ("host", "settings", "answered", "refused", "of_foreign_pages"),
    [
        ("127.0.0.1", {"allowed_hosts": ("Llm.Example", "192.0.2.7", "::2")},
         "llm.example llm.example:443 192.0.2.7 [::2]:1 localhost", "example sub.llm.example 192.0.2.8", 403),
        ("127.0.0.1", {"allowed_hosts": ("*",)}, "evil.example", "", 200),
        ("127.0.0.1", {"key_required": True}, "llm.example", "", 200),
        ("0.0.0.0", {}, "llm.example", "", 200),
        # probes send the address that they connect to
        ("0.0.0.0", {"key_required": True, "allowed_hosts": ("llm.example",)},
         "llm.example 10.1.2.3:30000", "evil.example 10.1.2.4:30000", 200),
        ("::1", {}, "[::1]:30000", "evil.example", 403),
    ],
)  # fmt: skip
def test_other_servers(host: str, settings: dict[str, Any], answered: str, refused: str, of_foreign_pages: int) -> None:
    try:
        policy = hosts(host, **settings)
    except (UserError, OSError):
        assert host == "::1"
        pytest.skip("needs IPv6")
    for name in answered.split():
        assert ask(policy, server="10.1.2.3", host=name)[0] == 200
        page = ask(policy, server="10.1.2.3", host=name, origin="https://app.example")
        assert page[0] == of_foreign_pages
    for name in refused.split():
        assert ask(policy, server="10.1.2.3", host=name)[0] == 421


def test_the_port_for_metrics_never_requires_a_key(tmp_path: Path) -> None:
    for host, metrics_host, statuses in (
        ("127.0.0.1", "127.0.0.1", (200, 421)),
        ("0.0.0.0", "127.0.0.1", (200, 421)),
        ("127.0.0.1", "0.0.0.0", (200, 200)),
    ):
        settings = Settings(device="cpu", host=host, api_key="key", metrics_port=1, metrics_host=metrics_host)
        with bind(host, 0) as requests, bind(metrics_host, 0) as metrics:
            policies = Listeners(requests, metrics, None, 8).hosts(settings)
        assert tuple(ask(each, host="evil.example")[0] for each in policies) == statuses


@pytest.mark.parametrize("name", ["", "http://llm.example", "llm.example:80", "*.example", "a b", "[::1]:80"])
def test_invalid_names(name: str) -> None:
    refuses("--allowed-hosts takes names and addresses", Settings, device="cpu", allowed_hosts=(name,))


def test_metrics_are_local_by_default() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    listeners = Listeners.open(Settings(device="cpu", host="0.0.0.0", port=port, metrics_port=port % 60000 + 1025))
    try:
        assert listeners.metrics is not None
        assert listeners.metrics.getsockname()[0] == "127.0.0.1"
    finally:
        listeners.requests.close()
        if listeners.metrics is not None:
            listeners.metrics.close()
