"""The gate: who gets in, and who is under way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.server.http.gate import Gate
from outrider.server.http.lifecycle import Lifecycle

KEY = "a-secret"


class Passed:
    """A gate before `inner`, and what came out of it."""

    def __init__(self, inner: Any, key: str | None = None) -> None:
        self.lifecycle, self.sent = Lifecycle(None, 0), []
        self.gate = Gate(inner, key, self.lifecycle)

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def ask(self, path: str = "/v1/models", method: str = "GET", **headers: bytes) -> int:
        """Status of the answer."""
        raw = [(name.encode(), value) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "method": method, "headers": raw}
        asyncio.run(self.gate(scope, None, self.send))
        return self.sent[0]["status"]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": b"Bearer wrong"}, 401),
        ({"authorization": b"Bearer a-secretx"}, 401),
        ({"authorization": b"a-secret"}, 401),
        ({"authorization": b"Bearer \xff"}, 401),
        ({"authorization": b"Bearer a-secret"}, 200),
    ],
)
def test_key_is_compared_whole(headers: dict[str, bytes], status: int) -> None:
    passed = Passed(answer, KEY)
    assert passed.ask(**headers) == status


def test_probes_need_no_key() -> None:
    for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 401), ("/health/", 401)):
        assert Passed(answer, KEY).ask(path) == status
    assert Passed(answer).ask("/metrics") == 200


def test_the_page_needs_no_key_and_its_numbers_do() -> None:
    for path, status in (("/", 200), ("/page/main.js", 200), ("/outrider/live", 401), ("//", 401), ("/page", 401)):
        assert Passed(answer, KEY).ask(path) == status


def test_only_posts_are_under_way() -> None:
    under_way = []

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        under_way.append(passed.lifecycle.in_flight)
        raise RuntimeError("a bug")

    passed = Passed(fail)
    for method in ("GET", "POST"):
        with pytest.raises(RuntimeError):
            passed.ask("/v1/completions", method)
    assert under_way == [0, 1]
    assert passed.lifecycle.in_flight == 0


def test_what_is_not_http_passes() -> None:
    types = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        types.append(scope["type"])

    asyncio.run(Passed(inner, KEY).gate({"type": "lifespan"}, None, None))
    assert types == ["lifespan"]
