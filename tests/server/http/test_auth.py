"""The gate: keys, rates, concurrency, and counts of requests under way."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from in_loop import in_loop
from served_app import say_ok

from outrider.server.http.keys import key_file
from outrider.server.http.keys.access import Access
from outrider.server.http.keys.auth import AuthMiddleware
from outrider.server.http.lifecycle import Lifecycle

KEY = b"a-secret"


class Passed:
    """A gate in front of `inner`, and its answers."""

    def __init__(self, inner: Any, key: bytes | None = None, file: Path | None = None, clock: Any = None) -> None:
        self.lifecycle, self.sent = Lifecycle(None, 0), []
        self.access = Access(key and key.decode(), file, clock=clock)
        self.gate = AuthMiddleware(inner, self.access, self.lifecycle)

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def ask(self, path: str = "/v1/models", method: str = "GET", **headers: bytes) -> int:
        return asyncio.run(self.coming(path, method, **headers))

    def post(self, authorization: bytes, path: str = "/v1/completions") -> int:
        return self.ask(path, "POST", authorization=authorization)

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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        *(
            ({"authorization": wrong}, 401)
            for wrong in (b"Bearer wrong", b"Bearer a-secretx", b"a-secret", b"Bearer \xff")
        ),
        *(({"authorization": right}, 200) for right in (b"Bearer a-secret", b"bearer a-secret")),
        ({"x-api-key": b"a-secret"}, 200),
        ({"x-api-key": b"a-secretx"}, 401),
        ({"x-api-key": b"a-secret", "authorization": b"Bearer wrong"}, 401),
    ],
)
def test_key_is_compared_whole(headers: dict[str, bytes], status: int) -> None:
    passed = Passed(say_ok, KEY)
    assert passed.ask(**headers) == status


def test_probes_and_the_page_need_no_key_and_numbers_do() -> None:
    for path in ("/health", "/ready", "/", "/page/main.js"):
        assert Passed(say_ok, KEY).ask(path) == 200
    for path in ("/metrics", "/health/", "/outrider/live", "//", "/page"):
        assert (Passed(say_ok, KEY).ask(path), Passed(say_ok).ask(path)) == (401, 200)


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


@in_loop
async def test_an_unfinished_request_holds_a_place_of_its_own_key_only(tmp_path: Path) -> None:
    path, header = file_of(tmp_path, one={"concurrency": 1}, free={})

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/endless":
            await asyncio.Event().wait()
        await say_ok(scope, receive, send)

    passed = Passed(wait, file=path)
    endless = asyncio.create_task(passed.coming("/endless", "POST", authorization=header["one"]))
    await asyncio.sleep(0)
    assert passed.lifecycle.in_flight == 0
    assert await passed.coming("/v1/completions", "POST", authorization=header["one"]) == 429
    assert await passed.coming("/v1/completions", "POST", authorization=header["free"]) == 200
    endless.cancel()
    await asyncio.wait([endless])
    assert await passed.coming("/v1/completions", "POST", authorization=header["one"]) == 200


def file_of(folder: Path, **fields: dict[str, Any]) -> tuple[Path, dict[str, bytes]]:
    path, headers = folder / "keys.toml", {}
    for name, limits in fields.items():
        secret = key_file.new()
        key_file.add(path, key_file.Key(name=name, digest=key_file.digest(secret.encode()), **limits))
        headers[name] = f"Bearer {secret}".encode()
    return path, headers


def test_each_key_has_its_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, header = file_of(tmp_path, slow={"rate": key_file.RequestRate(2, 3600)}, free={})
    passed = Passed(say_ok, file=path)
    assert [passed.post(header["slow"]) for _ in range(3)] == [200, 200, 429]
    assert (passed.error["code"], passed.error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert 3590 <= passed.retry_after <= 3601
    assert [passed.post(header["free"]) for _ in range(3)] == [200] * 3
    assert passed.ask(authorization=header["slow"]) == 200  # only requests to the model are limited
    for jump in (-1e6, 1e6):  # the wall clock does not affect the rate
        monkeypatch.setattr("time.time", lambda jump=jump: jump)
        monkeypatch.setattr("time.time_ns", lambda jump=jump: int(jump * 1e9))
        assert passed.post(header["slow"]) == 429
        assert 3590 <= passed.retry_after <= 3601


def test_a_rate_is_of_any_stretch_of_time(tmp_path: Path) -> None:
    path, header = file_of(tmp_path, key={"rate": key_file.RequestRate(2, 60)})
    now = 1000
    passed, asked = Passed(say_ok, file=path, clock=lambda: now), []
    for now in (1000, 1050, 1059, 1061, 1062, 1111):  # noqa: B007
        asked.append(passed.post(header["key"]))
    assert asked == [200, 200, 429, 200, 429, 200]


@in_loop
async def test_each_key_has_its_own_concurrency(tmp_path: Path) -> None:
    path, header = file_of(tmp_path, two={"concurrency": 2}, free={})
    go_on = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await say_ok(scope, receive, send)

    passed = Passed(wait, file=path)

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


@pytest.mark.parametrize("route", ["/outrider/tune", "/load_lora_adapter", "/unload_lora_adapter"])
def test_only_administrators_measure_and_load_adapters(tmp_path: Path, route: str) -> None:
    path, header = file_of(tmp_path, user={}, operator={"admin": True})
    passed = Passed(say_ok, KEY, path)
    assert passed.post(header["user"], route) == 403
    assert (passed.error["code"], passed.error["type"]) == ("admin_key_required", "permission_error")
    for key in (header["operator"], b"Bearer " + KEY):
        assert passed.post(key, route) == 200
    assert passed.ask("/v1/models", authorization=header["user"]) == 200
    assert Passed(say_ok).ask(route, "POST") == 200  # without keys, anybody may
