"""A server with limits of every kind, and keys with their own."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from metrics_page import MetricsPage
from running import ForkedServer, free_port

from outrider.server.http.keys import key_file

RUNNING, QUEUED, CONNECTIONS = 4, 4, 80
QUEUE_SECONDS, REQUEST_SECONDS, STALL_SECONDS = 3.0, 5.0, 2.0
MINUTE_TOKENS, DAY_TOKENS, REQUEST_TOKENS = 200, 10_000, 3500
SHORT = {"prompt": "1 2 3 1 2 3 1", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
LONG = SHORT | {"max_tokens": 900, "speculation": {"enabled": False}}
"""More than four of these take longer than a request may."""


class Limited:
    """A server with keys. `file` lists them; `headers` by name of a key."""

    def __init__(self, folder: Path) -> None:
        self.file, self.headers, self.metrics_port = folder / "keys.toml", {}, free_port()
        self.client = httpx.Client(timeout=120)  # making one takes longer than an answer
        self.add("operator", admin=True)
        self.add("two", concurrency=2)
        self.add("minute", tokens_per_minute=MINUTE_TOKENS)
        self.add("day", tokens_per_day=DAY_TOKENS)
        self.add("short", max_tokens_per_request=40)
        self.usage_file = folder / "usage.json"
        limits = {
            "--api-keys": self.file, "--usage-file": self.usage_file, "--max-request-tokens": REQUEST_TOKENS,
            "--log-requests": "summary", "--metrics-port": self.metrics_port, "--max-running-requests": RUNNING,
            "--max-queued-requests": QUEUED, "--max-queue-seconds": QUEUE_SECONDS,
            "--max-request-seconds": REQUEST_SECONDS, "--max-stall-seconds": STALL_SECONDS,
            "--max-connections": CONNECTIONS, "--max-total-tokens": 4096,
        }  # fmt: skip
        self.server = ForkedServer(folder / "log", *(str(word) for flag in limits.items() for word in flag))

    def make(self, name: str, **limits: Any) -> key_file.Key:
        secret = key_file.new()
        self.headers[name] = {"Authorization": f"Bearer {secret}"}
        return key_file.Key(name=name, digest=key_file.digest(secret.encode()), **limits)

    def add(self, name: str, **limits: Any) -> None:
        key_file.add(self.file, self.make(name, **limits))

    def ask(self, name: str, body: dict[str, Any] = SHORT, route: str = "completions") -> httpx.Response:
        return self.client.post(f"{self.server.url}/v1/{route}", json=body, headers=self.headers[name])

    def stream(self, name: str, body: dict[str, Any]) -> contextlib.AbstractContextManager[httpx.Response]:
        url, headers = f"{self.server.url}/v1/completions", self.headers[name]
        return self.client.stream("POST", url, json=body | {"stream": True}, headers=headers)

    def ask_all(self, name: str, count: int, body: dict[str, Any] = SHORT) -> list[httpx.Response]:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda _: self.ask(name, body), range(count)))

    def used(self, name: str) -> dict[str, float]:
        """Tokens of the key by kind, from the metrics."""
        page = self.metrics()
        kinds = ("prompt", "cached", "completion")
        return {kind: page.value("outrider_key_tokens_total", key=name, kind=kind) or 0 for kind in kinds}

    def metrics(self) -> MetricsPage:
        return MetricsPage(f"http://127.0.0.1:{self.metrics_port}")

    def logged(self, answer: httpx.Response) -> list[str]:
        name = f"request_id={answer.headers['X-Request-Id']}"
        (line,) = (line for line in self.server.output().splitlines() if name in line)
        return line.split()

    def in_flight(self) -> float:
        return self.metrics().value("outrider_requests_in_flight")

    def idle(self) -> bool:
        page = self.metrics()
        return page.value("sglang:num_running_reqs") == page.value("sglang:num_queue_reqs") == 0


def code(answer: httpx.Response) -> str | None:
    return None if answer.status_code == 200 else answer.json()["error"]["code"]


def usage_of(answer: httpx.Response) -> dict[str, int]:
    """Final usage of an answer, streamed or not."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["usage"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return events[-1]["usage"]
