"""Health, readiness and metrics."""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from metrics_page import metric
from running import HTTP, Server

from outrider.server.http.routes import health


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


def test_known_routes_are_counted_by_path_and_unknown_ones_together(server: Server) -> None:
    unknown = ("/v1/made-up", "/v1/embeddings", "/v1/models/made-up")
    for path in ("/ready", "/outrider/live", "/openapi.json", *unknown):
        HTTP.get(server.url + path)
    counted = set(re.findall(r'outrider_http_requests_total{path="([^"]*)"', HTTP.get(server.url + "/metrics").text))
    assert counted >= {"/ready", "/outrider/live", "/openapi.json", "other"}
    assert not counted & {*unknown}


def test_a_scrape_does_not_wait_for_clients_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads of the loop are busy with grammars."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    app, done = FastAPI(), threading.Event()
    health.install_metrics(app)

    async def main() -> int:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        checking = loop.run_in_executor(None, done.wait)
        try:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return (await asyncio.wait_for(client.get("/metrics"), 10)).status_code
        finally:
            done.set()
            await checking

    assert asyncio.run(main()) == 200
