"""Health, readiness, metrics, and the reach of the server."""

import re

import openai
import psutil
from metrics_page import metric
from running import HTTP, Server


def test_health_and_ready(server: Server) -> None:
    assert HTTP.get(server.url + "/health").json() == {"status": "ok", "dead_processes": []}
    assert HTTP.get(server.url + "/ready").json() == {"status": "ready"}


def test_health_generates_no_tokens(server: Server) -> None:
    def generated() -> float:
        return metric(server.url, "sglang:prompt_tokens_total")

    before = generated()
    for _ in range(5):
        assert server.status("/health") == 200
    assert generated() == before


def test_metrics_count_requests(server: Server, client: openai.OpenAI, model: str) -> None:
    def answered() -> float:
        return metric(server.url, "outrider_http_requests_total", path="/v1/completions", status="200")

    before = answered()
    client.completions.create(model=model, prompt="Hello", max_tokens=2)
    assert answered() == before + 1


def test_known_routes_are_counted_by_path_and_unknown_ones_together(server: Server) -> None:
    unknown = ("/v1/made-up", "/v1/embeddings", "/v1/models/made-up")
    for path in ("/ready", "/outrider/live", "/openapi.json", *unknown):
        HTTP.get(server.url + path)
    counted = set(re.findall(r'outrider_http_requests_total{path="([^"]*)"', HTTP.get(server.url + "/metrics").text))
    assert counted >= {"/ready", "/outrider/live", "/openapi.json", "other"}
    assert not counted & {*unknown}


def test_only_one_process_listens_on_the_port_and_only_on_localhost(server: Server) -> None:
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    listening = [
        (connection.laddr, process.pid)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [pid for address, pid in listening if address.port == server.port] == [server.process.pid]
    assert all(address.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for address, _ in listening), listening
