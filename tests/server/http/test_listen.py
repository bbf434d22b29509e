"""Binding the server's address, and errors."""

import os
import socket
from pathlib import Path

import pytest
from refusals import refuses

from outrider.server.http.listen import bind

UNPRIVILEGED = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


def test_free_port_is_held_from_now_on() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert not listener.get_inheritable()
        listener.listen()
        refuses(rf"port {port} on 127.0.0.1 is in use; choose another with --port", bind, "127.0.0.1", port)
    bind("127.0.0.1", port).close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="needs IPv6")
def test_ipv6() -> None:
    with bind("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


@pytest.mark.parametrize(
    ("host", "message"),
    [("no.such.host.invalid", "is not an address of this machine"), ("192.0.2.1", "cannot listen on 192.0.2.1:0")],
)
def test_address_that_is_not_ours(host: str, message: str) -> None:
    refuses(message, bind, host, 0)


@pytest.mark.skipif(
    os.geteuid() == 0 or not UNPRIVILEGED.exists() or int(UNPRIVILEGED.read_text()) < 2,
    reason="here anybody may have port 1",
)
def test_port_that_needs_rights() -> None:
    refuses("port 1 needs more rights", bind, "127.0.0.1", 1)
