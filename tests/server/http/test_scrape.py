"""The route of metrics, without a server."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from outrider.server.http.routes import health


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
