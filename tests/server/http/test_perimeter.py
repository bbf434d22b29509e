"""A server under attack: silent clients, foreign pages, and orders for SGLang."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from asking import unread
from metrics_page import MetricsPage
from running import HTTP, ForkedServer, Server, free_port, wait_until
from small_target import SmallTarget

RECEIVE_SECONDS, STEP_SECONDS, LAME_DUCK_SECONDS = 3.0, 2.5, 3.0
ENDLESS = 120
"""Connections with requests that never finish."""
SHORT = {"prompt": "1 2 3 1 2 3 1", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
ORDERS = {
    "X-SMG-Routing-Key": "key", "X-Data-Parallel-Rank": "none", "X-Override-Priority": "high",
    "X-Override-Bootstrap-Host": "evil.example", "X-Sglext-Return-Input-Ids": "1", "X-Sglext-Return-Output-Ids": "1",
}  # fmt: skip


class Guarded:
    """A server without a key and with one place in its queue."""

    def __init__(self, server: Server, metrics_port: int) -> None:
        self.server, self.url, self.metrics_url = server, server.url, f"http://127.0.0.1:{metrics_port}"

    def ask(self, body: dict[str, Any] = SHORT, **options: Any) -> httpx.Response:
        return HTTP.post(f"{self.url}/v1/completions", json=body, timeout=60, **options)

    def metric(self, name: str, **labels: str) -> float:
        return MetricsPage(self.metrics_url).value(name, **labels)


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Guarded]:
    metrics_port = free_port()
    flags = {
        "--metrics-port": metrics_port, "--max-receive-seconds": RECEIVE_SECONDS, "--max-step-seconds": STEP_SECONDS,
        "--lame-duck-seconds": LAME_DUCK_SECONDS, "--max-running-requests": 4, "--max-queued-requests": 1,
        "--max-total-tokens": 4096,
    }  # fmt: skip
    words = [*small_target.flags(), *(str(word) for flag in flags.items() for word in flag)]
    with ForkedServer(tmp_path_factory.mktemp("guarded") / "log", *words) as started:
        yield Guarded(started, metrics_port)


def test_bodies_that_never_end_take_no_place_and_are_closed(guarded_server: Guarded) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    pieces = (f"{head}Content-Length: 1000\r\n\r\n{{", f"{head}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n", head)
    clients = [socket.create_connection(("127.0.0.1", guarded_server.server.port)) for _ in range(ENDLESS)]
    try:
        began = time.monotonic()
        for index, client in enumerate(clients):
            client.settimeout(30)
            client.sendall(pieces[index % len(pieces)].encode())
        for _ in range(3):
            assert guarded_server.ask().status_code == 200
        assert guarded_server.metric("outrider_requests_in_flight") == 0
        for client in clients:
            answer = client.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert b'"receive_timeout"' in answer
        assert time.monotonic() - began < 5 * RECEIVE_SECONDS
    finally:
        for client in clients:
            client.close()
    counted = guarded_server.metric("outrider_http_requests_total", path="/v1/completions", status="408")
    assert counted == ENDLESS * 2 / 3
    assert "Traceback" not in guarded_server.server.output()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/outrider/live", "/health", "/ready", "/docs/", "/"])
def test_foreign_hosts_are_refused_everywhere_and_no_request_is_redirected(guarded_server: Guarded, path: str) -> None:
    for url in (guarded_server.url, guarded_server.metrics_url):
        answer = HTTP.get(url + path, headers={"Host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (421, "misdirected_request")
        assert "location" not in answer.headers
    slashed = HTTP.get(guarded_server.url + path.rstrip("/") + "/")
    assert (slashed.status_code == 404) == (path != "/")
    assert "location" not in slashed.headers


def test_a_foreign_page_cannot_send_requests_without_a_preflight(guarded_server: Guarded) -> None:
    evil = {"Origin": "http://evil.example"}
    url, data = f"{guarded_server.url}/v1/completions", json.dumps(SHORT)
    answer = HTTP.post(url, content=data, headers=evil | {"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert HTTP.post(url, json=SHORT, headers=evil).status_code == 403
    assert HTTP.post(url, content=data, headers={"Content-Type": "text/plain"}).status_code == 415  # old browsers
    assert HTTP.post(url, json=SHORT, headers={"Origin": guarded_server.url}).status_code == 200
    preflight = httpx.options(url, headers=evil | {"Access-Control-Request-Method": "POST"})
    assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_sglang_takes_no_orders_from_headers(guarded_server: Guarded) -> None:
    """SGLang would refuse them, or change the answer."""
    for path, body in (("completions", SHORT), ("chat/completions", CHAT)):
        plain = guarded_server.server.post(path, body)
        ordered = HTTP.post(f"{guarded_server.url}/v1/{path}", json=body, headers=ORDERS, timeout=60)
        assert ordered.status_code == 200, ordered.text
        assert ordered.json().keys() == plain.keys()
        assert ordered.json()["choices"] == plain["choices"]


def test_health_fails_while_the_engine_stalls_with_requests(guarded_server: Guarded) -> None:
    """It may have begun the requests or not. A slow reader is no reason."""
    server = guarded_server.server
    scheduler = server.children()["scheduler"]

    def stop_and_go_on(body: dict[str, Any], begun: bool) -> None:
        with ThreadPoolExecutor(1) as pool:
            if not begun:
                scheduler.suspend()
            asked = pool.submit(guarded_server.ask, body)
            if begun:
                wait_until(lambda: guarded_server.metric("sglang:num_running_reqs") == 1, 30)
                scheduler.suspend()
            try:
                assert server.status("/health") == server.status("/ready") == 200
                wait_until(lambda: server.status("/health") == 503, 5 * STEP_SECONDS)
                health = HTTP.get(f"{guarded_server.url}/health").json()
                assert health["status"] == "stalled"
                assert "--max-step-seconds" in health["reason"]
                assert server.status("/ready") == 503
                refused = guarded_server.ask()
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            finally:
                scheduler.resume()
            assert asked.result().status_code == 200
        wait_until(lambda: server.status("/health") == server.status("/ready") == 200, 30)
        assert guarded_server.ask().status_code == 200

    stop_and_go_on(SHORT, begun=False)
    long = {"max_tokens": 900, "ignore_eos": True, "speculation": {"enabled": False}}
    stop_and_go_on(SHORT | long, begun=True)
    assert "no step has ended" in server.output()
    assert "makes progress again" in server.output()


def test_health_does_not_fail_for_a_slow_reader(guarded_server: Guarded) -> None:
    messages = [{"role": "user", "content": "Count."}]
    body = {"messages": messages, "max_tokens": 400, "ignore_eos": True, "stream": True}
    body |= {"logprobs": True, "top_logprobs": 20}
    with unread(guarded_server.server, "/v1/chat/completions", body):
        wait_until(lambda: guarded_server.metric("outrider_requests_in_flight") == 1, 30)
        wait_until(lambda: guarded_server.metric("sglang:num_running_reqs") == 0, 60)
        until = time.monotonic() + 2 * STEP_SECONDS
        while time.monotonic() < until:
            assert guarded_server.server.status("/health") == 200
            time.sleep(0.2)


def test_a_stopping_server_answers_open_connections_and_waits_for_no_endless_body(guarded_server: Guarded) -> None:
    """The last test."""
    server = guarded_server.server
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        client.sendall(b"Content-Length: 9\r\n\r\n")
        children = [*psutil.Process(server.process.pid).children(recursive=True)]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/ready") == 503, LAME_DUCK_SECONDS)
        assert guarded_server.ask().status_code == server.status("/health") == 200
        assert server.process.wait(20) == 0  # --drain-seconds are 30
        assert not any(child.is_running() for child in children)
