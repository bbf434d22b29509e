"""The gate: keys, rates, concurrency, and counts of requests under way."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.server.http.keys import key_file
from outrider.server.http.keys.access import Access
from outrider.server.http.keys.auth import AuthMiddleware
from outrider.server.http.lifecycle import Lifecycle

KEY = "a-secret"


class Passed:
    """A gate in front of `inner`, and its answers."""

    def __init__(self, inner: Any, key: str | None = None, file: Path | None = None, clock: Any = None) -> None:
        self.lifecycle, self.sent = Lifecycle(None, 0), []
        self.access = Access(key, file, clock=clock)
        self.gate = AuthMiddleware(inner, self.access, self.lifecycle)

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def ask(self, path: str = "/v1/models", method: str = "GET", **headers: bytes) -> int:
        return asyncio.run(self.coming(path, method, **headers))

    async def coming(self, path: str, method: str, **headers: bytes) -> int:
        raw = [(name.encode(), value) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "method": method, "headers": raw}
        pieces = iter((True, False))

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "more_body": next(pieces)}

        self.sent.clear()
        await self.gate(scope, receive, self.send)
        return self.sent[0]["status"]

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.sent[1]["body"])["error"]

    @property
    def retry_after(self) -> int:
        return int(dict(self.sent[0]["headers"])[b"retry-after"])


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
        ({"authorization": b"bearer a-secret"}, 200),
        ({"x-api-key": b"a-secret"}, 200),
        ({"x-api-key": b"a-secretx"}, 401),
        ({"x-api-key": b"a-secret", "authorization": b"Bearer wrong"}, 401),
    ],
)
def test_key_is_compared_whole(headers: dict[str, bytes], status: int) -> None:
    passed = Passed(answer, KEY)
    assert passed.ask(**headers) == status


def test_probes_and_the_page_need_no_key_and_numbers_do() -> None:
    for path in ("/health", "/ready", "/", "/page/main.js"):
        assert Passed(answer, KEY).ask(path) == 200
    for path in ("/metrics", "/health/", "/outrider/live", "//", "/page"):
        assert (Passed(answer, KEY).ask(path), Passed(answer).ask(path)) == (401, 200)


def test_only_posts_are_under_way_and_once_they_are_whole() -> None:
    under_way = []

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            under_way.append(passed.lifecycle.in_flight)
            more = (await receive())["more_body"]
        under_way.append(passed.lifecycle.in_flight)
        raise RuntimeError("a bug")

    passed = Passed(fail)
    for method in ("GET", "POST"):
        with pytest.raises(RuntimeError):
            passed.ask("/v1/completions", method)
    assert under_way == [0, 0, 0, 0, 0, 1]  # a request counts from its last byte on
    assert passed.lifecycle.in_flight == 0


def test_an_unfinished_request_holds_a_place_of_its_own_key_only(tmp_path: Path) -> None:
    path, header = file_of(tmp_path, one={"concurrency": 1}, free={})

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/endless":
            await asyncio.Event().wait()
        await answer(scope, receive, send)

    passed = Passed(wait, file=path)

    async def main() -> None:
        endless = asyncio.create_task(passed.coming("/endless", "POST", authorization=header["one"]))
        await asyncio.sleep(0)
        assert passed.lifecycle.in_flight == 0
        assert await passed.coming("/v1/completions", "POST", authorization=header["one"]) == 429
        assert await passed.coming("/v1/completions", "POST", authorization=header["free"]) == 200
        endless.cancel()
        await asyncio.wait([endless])
        assert await passed.coming("/v1/completions", "POST", authorization=header["one"]) == 200

    asyncio.run(main())


def file_of(folder: Path, **fields: dict[str, Any]) -> tuple[Path, dict[str, bytes]]:
    path, headers = folder / "keys.toml", {}
    for name, limits in fields.items():
        secret = key_file.new()
        key_file.add(path, key_file.Key(name=name, digest=key_file.digest(secret.encode()), **limits))
        headers[name] = f"Bearer {secret}".encode()
    return path, headers


def test_each_key_has_its_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, header = file_of(tmp_path, slow={"rate": key_file.RequestRate(2, 3600)}, free={})
    passed = Passed(answer, file=path)

    def ask(name: str, method: str = "POST") -> int:
        return passed.ask("/v1/completions", method, authorization=header[name])

    assert [ask("slow") for _ in range(3)] == [200, 200, 429]
    assert passed.error["code"] == "rate_limit_exceeded"
    assert passed.error["type"] == "rate_limit_error"
    assert 3590 <= passed.retry_after <= 3601
    assert [ask("free") for _ in range(3)] == [200] * 3
    assert ask("slow", "GET") == 200  # only requests to the model are limited
    for jump in (-1e6, 1e6):  # the wall clock does not affect the rate
        monkeypatch.setattr("time.time", lambda jump=jump: jump)
        monkeypatch.setattr("time.time_ns", lambda jump=jump: int(jump * 1e9))
        assert ask("slow") == 429
        assert 3590 <= passed.retry_after <= 3601


def test_a_rate_is_of_any_stretch_of_time(tmp_path: Path) -> None:
    path, header = file_of(tmp_path, key={"rate": key_file.RequestRate(2, 60)})
    now = 1000
    passed, asked = Passed(answer, file=path, clock=lambda: now), []
    for now in (1000, 1050, 1059, 1061, 1062, 1111):  # noqa: B007
        asked.append(passed.ask("/v1/completions", "POST", authorization=header["key"]))
    assert asked == [200, 200, 429, 200, 429, 200]


def test_each_key_has_its_own_concurrency(tmp_path: Path) -> None:
    path, header = file_of(tmp_path, two={"concurrency": 2}, free={})
    go_on = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await answer(scope, receive, send)

    passed = Passed(wait, file=path)

    async def main() -> None:
        def begin(name: str) -> asyncio.Task[int]:
            return asyncio.create_task(passed.coming("/v1/completions", "POST", authorization=header[name]))

        under_way = [begin("two") for _ in range(2)]
        await asyncio.sleep(0)
        assert await begin("two") == 429
        assert passed.error["code"] == "concurrency_limit_exceeded"
        assert passed.retry_after == 1
        free = begin("free")
        await asyncio.sleep(0)
        under_way[0].cancel()
        await asyncio.wait([under_way[0]])
        third = begin("two")
        await asyncio.sleep(0)
        go_on.set()
        assert {await task for task in (under_way[1], third, free)} == {200}
        assert passed.access.key_usage(header["two"]).under_way == 0

    asyncio.run(main())


def test_only_administrators_measure_and_load_adapters(tmp_path: Path) -> None:
    path, header = file_of(tmp_path, user={}, operator={"admin": True})
    passed = Passed(answer, KEY, path)
    assert passed.ask("/outrider/tune", "POST", authorization=header["user"]) == 403
    assert passed.error["code"] == "admin_key_required"
    assert passed.error["type"] == "permission_error"
    assert passed.ask("/outrider/tune", "POST", authorization=header["operator"]) == 200
    assert passed.ask("/outrider/tune", "POST", authorization=f"Bearer {KEY}".encode()) == 200
    assert passed.ask("/load_lora_adapter", "POST", authorization=header["user"]) == 403
    assert passed.ask("/unload_lora_adapter", "POST", authorization=header["user"]) == 403
    assert passed.ask("/v1/models", authorization=header["user"]) == 200
    assert Passed(answer).ask("/outrider/tune", "POST") == 200  # without keys, anybody may
