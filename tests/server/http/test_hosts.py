"""Checks of the names in Host and Origin."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from outrider.server.errors import UserError
from outrider.server.http.connections.hosts import AllowedHosts, HostGuard
from outrider.server.http.listen import Listeners, bind
from outrider.server.settings.settings import Settings

FOREIGN = (
    "evil.example", "evil.example:30000", "localhost.evil.example", "127.0.0.1.evil.example", "192.0.2.1", "[::2]",
)  # fmt: skip
OURS = ("localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:30000", "[::1]:30000", "[0:0:0:0:0:0:0:1]")
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

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "headers": raw, "server": (server, 30000)}
    asyncio.run(HostGuard(inner, policy)(scope, None, send))
    return sent[0]["status"], json.loads(sent[1]["body"]).get("error", {}).get("code")


@pytest.mark.parametrize("host", FOREIGN + BROKEN)
def test_foreign_hosts(host: str) -> None:
    assert ask(hosts(), host=host)[0] == 421


@pytest.mark.parametrize("host", OURS)
def test_own_hosts(host: str) -> None:
    assert ask(hosts(), host=host)[0] == 200


def test_a_request_without_a_host_is_no_browsers() -> None:
    assert ask(hosts())[0] == 200


def test_named_hosts_are_answered_as_well_as_our_own() -> None:
    policy = hosts(allowed_hosts=("Llm.Example", "192.0.2.7", "::2"))
    for host in ("llm.example", "llm.example:443", "192.0.2.7", "[::2]:1", "localhost"):
        assert ask(policy, host=host)[0] == 200
    for host in ("example", "sub.llm.example", "192.0.2.8"):
        assert ask(policy, host=host)[0] == 421
    assert ask(hosts(allowed_hosts=("*",)), host="evil.example", origin="https://evil.example")[0] == 200


def test_any_host_where_a_key_is_required_or_the_server_is_public() -> None:
    for policy in (hosts(key_required=True), hosts("0.0.0.0")):
        assert ask(policy, host="llm.example", origin="https://app.example")[0] == 200


def test_given_names_hold_there_too() -> None:
    """Probes send the address that they connect to."""
    policy = hosts("0.0.0.0", key_required=True, allowed_hosts=("llm.example",))
    assert ask(policy, host="llm.example")[0] == 200
    assert ask(policy, host="evil.example")[0] == 421
    assert ask(policy, server="10.1.2.3", host="10.1.2.3:30000")[0] == 200
    assert ask(policy, server="10.1.2.3", host="10.1.2.4:30000")[0] == 421
    assert ask(policy, host="llm.example", origin="https://app.example")[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://evil.example:30000", "null", "", "file://", "localhost"]
)
def test_a_foreign_page_may_not_send(origin: str) -> None:
    assert ask(hosts(), host="127.0.0.1:30000", origin=origin) == (403, "foreign_origin")


@pytest.mark.parametrize("origin", ["http://127.0.0.1:30000", "http://localhost:3000", "https://[::1]:8443"])
def test_our_own_pages_may(origin: str) -> None:
    assert ask(hosts(), host="127.0.0.1:30000", origin=origin)[0] == 200


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


def test_an_ipv6_loopback_address_is_one() -> None:
    try:
        policy = hosts("::1")
    except (UserError, OSError):
        pytest.skip("needs IPv6")
    assert ask(policy, host="evil.example")[0] == 421
    assert ask(policy, host="[::1]:30000")[0] == 200


@pytest.mark.parametrize("name", ["", "http://llm.example", "llm.example:80", "*.example", "a b", "[::1]:80"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(UserError, match="--allowed-hosts takes names and addresses"):
        Settings(device="cpu", allowed_hosts=(name,))


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
