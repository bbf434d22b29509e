"""TLS: our files, client certificates, and a renewed certificate under load."""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import certificate
from refusals import refuses
from running import wait_until
from served_app import say_ok, server_of

from outrider.server.http.connections import tls
from outrider.server.http.connections.tls import Tls
from outrider.server.http.listen import bind
from outrider.server.settings.settings import Settings

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
ASKED, LEFT = threading.Event(), threading.Event()


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] != "/wait":
        return await say_ok(scope, receive, send)
    await receive()
    ASKED.set()
    assert (await receive())["type"] == "http.disconnect"
    LEFT.set()


@contextlib.contextmanager
def served(settings: Settings) -> Iterator[str]:
    """The address of an app with these settings' TLS, watched as in the server."""
    tls = Tls.of(settings)
    assert tls is not None
    listener, server = bind("127.0.0.1", 0), server_of(app, 5.0, 8, tls)

    async def main() -> None:
        watching = asyncio.create_task(tls.watch())
        await server.serve([listener])
        watching.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        wait_until(lambda: server.started and server.servers, 30)
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def admitted(url: str, trusted: str, clients: Sequence[tuple[str, str] | None]) -> list[bool]:
    """Return whether each client is answered, with its certificate and key or none."""
    answers = []
    for client in clients:
        context = ssl.create_default_context(cafile=trusted)
        if client is not None:
            context.load_cert_chain(*client)
        try:
            answers.append(httpx.get(url, verify=context).text == "ok")
        except httpx.TransportError:
            answers.append(False)
    return answers


def subject(url: str) -> str:
    host, port = url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port)))


def test_a_client_that_trusts_the_certificate_is_answered(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "server")
    with served(Settings(ssl_certfile=crt, ssl_keyfile=key)) as url:
        assert httpx.get(url, verify=ssl.create_default_context(cafile=crt)).text == "ok"
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(url)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"))


def test_changed_authorities_are_loaded_and_revoked_ones_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "POLL_SECONDS", 0.05)
    crt, key = certificate(tmp_path, "server")
    first, second = (certificate(tmp_path, f"authority-{number}")[0] for number in "12")
    signed = [certificate(tmp_path, f"client-{number}", signed_by=f"authority-{number}") for number in "12"]
    clients, trusted = [*signed, certificate(tmp_path, "stranger"), None], tmp_path / "trusted.crt"
    shutil.copy(first, trusted)
    with served(Settings(ssl_certfile=crt, ssl_keyfile=key, ssl_ca_certs=str(trusted))) as url:
        assert admitted(url, crt, clients) == [True, False, False, False]
        trusted.write_text("damaged")
        assert admitted(url, crt, clients) == [True, False, False, False]
        shutil.copy(second, trusted)
        wait_until(lambda: admitted(url, crt, clients) == [False, True, False, False], 10)


@pytest.mark.parametrize("says_so", [False, True])
def test_a_client_that_leaves_is_noticed_at_once(tmp_path: Path, says_so: bool) -> None:
    crt, key = certificate(tmp_path, "server")
    ASKED.clear()
    LEFT.clear()
    with served(Settings(ssl_certfile=crt, ssl_keyfile=key)) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        client = ssl.create_default_context(cafile=crt).wrap_socket(
            socket.create_connection(address), server_hostname="127.0.0.1"
        )
        client.sendall(b"GET /wait HTTP/1.1\r\nHost: here\r\n\r\n")
        assert ASKED.wait(30)
        if says_so:
            client.unwrap().close()
        client.close()
        assert LEFT.wait(30)


def test_a_renewed_certificate_is_loaded_and_a_bad_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "POLL_SECONDS", 0.05)
    crt, key = certificate(tmp_path, "server")
    new_crt, new_key = certificate(tmp_path / "new", "server")
    with served(Settings(ssl_certfile=crt, ssl_keyfile=key)) as url:
        before = subject(url)
        Path(crt).write_text("damaged")
        shutil.copy(new_key, key)
        assert subject(url) == before
        shutil.copy(new_crt, crt)
        wait_until(lambda: subject(url) != before, 30)
        assert httpx.get(url, verify=ssl.create_default_context(cafile=new_crt)).text == "ok"


def test_an_encrypted_key_needs_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crt, key = certificate(tmp_path, "server", password="a-password")
    settings = Settings(ssl_certfile=crt, ssl_keyfile=key)
    refuses("OUTRIDER_SSL_KEYFILE_PASSWORD", Tls.of, settings)
    monkeypatch.setenv("OUTRIDER_SSL_KEYFILE_PASSWORD", "a-password")
    with served(settings) as url:
        assert httpx.get(url, verify=ssl.create_default_context(cafile=crt)).text == "ok"


def test_mismatched_files_are_refused_before_the_start(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "server")
    _, foreign_key = certificate(tmp_path, "other")
    text = tmp_path / "text"
    text.write_text("not PEM")
    for files, message in (
        ({"ssl_certfile": crt, "ssl_keyfile": foreign_key}, "other.key is not that of certificate"),
        ({"ssl_certfile": crt}, "--ssl-keyfile names a key"),
        ({"ssl_certfile": str(text), "ssl_keyfile": key}, "cannot be used"),
        ({"ssl_certfile": "/no/such/file", "ssl_keyfile": key}, "cannot be read: No such file"),
        ({"ssl_certfile": crt, "ssl_keyfile": key, "ssl_ca_certs": str(text)}, "--ssl-ca-certs"),
        ({"ssl_certfile": crt, "ssl_keyfile": key, "ssl_ca_certs": "/no/such/file"}, "--ssl-ca-certs"),
    ):
        refuses(message, Tls.of, Settings(**files))
    assert Tls.of(Settings()) is None


def test_an_expired_certificate_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crt, key = certificate(tmp_path, "server")

    def warn() -> None:
        tls = Tls.of(Settings(ssl_certfile=crt, ssl_keyfile=key))
        assert tls is not None
        tls.warn()

    warn()
    assert caplog.messages == []
    renew = ["openssl", "x509", "-in", crt, "-signkey", key, "-days", "-1", "-out", crt]
    subprocess.run(renew, check=True, capture_output=True)
    warn()
    assert caplog.messages == [f"clients will not take the certificate {crt}: certificate has expired"]


def test_a_certificate_that_is_being_written_ends_no_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crt, key = certificate(tmp_path, "server")
    tls = Tls.of(Settings(ssl_certfile=crt, ssl_keyfile=key))
    assert tls is not None
    Path(crt).write_text(Path(crt).read_text()[:100])
    tls.warn()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
