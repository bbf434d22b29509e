"""Measures a server's other answers while a client sends it a body."""

import threading
import time
from dataclasses import dataclass

import httpx
import psutil
from running import Server

PROBE_SECONDS = 0.005


@dataclass(frozen=True)
class Observed:
    """answer: to the body. seconds: until it came. health_seconds: slowest answer of /health meanwhile. grown_bytes:
    growth of the HTTP process's memory, at its peak."""

    answer: httpx.Response
    seconds: float
    health_seconds: float
    grown_bytes: int


def send(server: Server, route: str, body: bytes) -> Observed:
    """Send a body while a second connection requests /health repeatedly."""
    process = psutil.Process(server.process.pid)
    ended, slowest, peak = threading.Event(), 0.0, 0

    with httpx.Client(base_url=server.url, timeout=300) as client, httpx.Client(base_url=server.url, timeout=300) as by:
        by.get("/health"), client.get("/health")
        before = process.memory_info().rss

        def probe() -> None:
            nonlocal slowest, peak
            while not ended.is_set():
                began = time.monotonic()
                assert by.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
                peak = max(peak, process.memory_info().rss)
                ended.wait(PROBE_SECONDS)

        thread = threading.Thread(target=probe)
        thread.start()
        began = time.monotonic()
        try:
            answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
        finally:
            seconds = time.monotonic() - began
            ended.set()
            thread.join()
    return Observed(answer, seconds, slowest, max(0, peak - before))
