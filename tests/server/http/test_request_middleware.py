"""Request ids, outcomes, and streams that pass piece by piece."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.server.http import request_middleware
from outrider.server.http.request_middleware import RequestMiddleware
from outrider.server.processes import logs
from outrider.server.settings.settings import Settings

ANSWERING = "/v1/completions"


class Counted:
    """Records counts."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, int]] = []
        self.outcomes: list[str] = []
        self.under_way = 0

    def finished(self, path: str, status: int) -> None:
        self.answers.append((path, status))

    def ended(self, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes.append(outcome)

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


def scope_of(path: str, method: str = "POST", **headers: bytes) -> dict[str, Any]:
    raw = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    return {"type": "http", "path": path, "method": method, "headers": raw}


class Passed:
    """A watch around `inner`, and its answers. leaves: once its request is read."""

    def __init__(self, inner: Any, *, leaves: bool = False) -> None:
        self.counted, self.sent, self.leaves = Counted(), [], leaves
        self.watch = RequestMiddleware(inner, self.counted, log=True)

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.disconnect" if self.leaves else "http.request"}

    def ask(self, path: str = ANSWERING, method: str = "POST", **headers: bytes) -> str:
        asyncio.run(self.watch(scope_of(path, method, **headers), self.receive, self.send))
        return dict(self.sent[0]["headers"])[b"x-request-id"].decode()


def answering(status: int = 200, pieces: int = 1) -> Any:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for left in reversed(range(pieces)):
            await send({"type": "http.response.body", "body": b"ok", "more_body": left > 0})

    return answer


def test_a_request_gets_an_id_and_keeps_its_own() -> None:
    first, second = Passed(answering()).ask(), Passed(answering()).ask()
    assert len(first) == len(second) == 32
    assert first != second
    assert Passed(answering(401)).ask(x_request_id=b"from-a-client") == "from-a-client"


@pytest.mark.parametrize("given", [b"", b"with space", b"new\nline", b"\xff", b"x" * 129])
def test_an_id_that_would_hurt_a_log_is_replaced(given: bytes) -> None:
    assert len(Passed(answering()).ask(x_request_id=given)) == 32


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "completed"), (400, "refused"), (404, "refused"), (429, "overloaded"), (500, "failed"), (503, "failed")],
)
def test_outcomes(status: int, outcome: str) -> None:
    passed = Passed(answering(status))
    passed.ask()
    assert passed.counted.outcomes == [outcome]
    assert passed.counted.answers == [(ANSWERING, status)]


def test_a_client_that_leaves_before_its_answer_is_whole_cancels() -> None:
    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await answering(pieces=2)(scope, receive, send)
        await receive()

    for inner, outcome in ((half, "cancelled"), (whole, "completed")):
        passed = Passed(inner, leaves=True)
        passed.ask()
        assert passed.counted.outcomes == [outcome]


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_work_for_a_client_that_has_left_ends(begun: bool, stubborn: bool) -> None:
    """It ends even if the work ignores a first cancellation."""
    steps = []

    async def work(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            steps.append("begun")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not stubborn:
                raise
        finally:
            steps.append("ended")
        await asyncio.sleep(60)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01 if steps else 0)
        return {"type": "http.disconnect" if steps else "http.request"}

    passed = Passed(work)
    asyncio.run(asyncio.wait_for(passed.watch(scope_of(ANSWERING), receive, passed.send), 30))
    assert steps == ["begun", "ended"]
    assert passed.counted.outcomes == ["cancelled"]
    assert passed.counted.answers == [(ANSWERING, 200 if begun else 499)]
    assert passed.counted.under_way == 0


def test_an_administrators_change_is_made_whole() -> None:
    async def load(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.05)
        await answering()(scope, receive, send)

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]
    passed = Passed(load)
    asyncio.run(passed.watch(scope_of("/load_lora_adapter"), receive, passed.send))
    assert passed.counted.answers == [("/load_lora_adapter", 200)]


@pytest.mark.parametrize(("error", "outcome"), [(503, "failed"), (400, "refused")])
def test_a_stream_that_ends_with_an_error_counts_as_failed(error: int, outcome: str) -> None:
    async def stream(scope: Any, receive: Any, send: Any) -> None:
        watched = request_middleware.current()
        assert watched is not None
        watched.error = error
        await answering(pieces=3)(scope, receive, send)

    passed = Passed(stream)
    passed.ask()
    assert passed.counted.outcomes == [outcome]
    assert request_middleware.current() is None


def test_a_bug_counts_and_leaves_no_request_under_way() -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        assert passed.counted.under_way == 0
        await receive()
        assert passed.counted.under_way == 1
        raise RuntimeError("a bug")

    passed = Passed(fail)
    with pytest.raises(RuntimeError):
        passed.ask()
    assert passed.counted.answers == [(ANSWERING, 500)]
    assert passed.counted.outcomes == ["failed"]
    assert passed.counted.under_way == 0


def test_a_stream_passes_piece_by_piece_and_counts_at_its_end() -> None:
    seen = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"1", b"2"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            seen.append((passed.sent[-1]["body"], list(passed.counted.answers)))

    passed = Passed(stream)
    passed.ask()
    assert seen == [(b"1", []), (b"2", [])]
    assert passed.counted.answers == [(ANSWERING, 200)]


def test_a_line_per_request_but_none_for_probes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logs.REQUESTS)
    Passed(answering()).ask(x_request_id=b"mine")
    for path, status in (("/health", 200), ("/health", 503), ("/two\nlines", 404), (ANSWERING, 200)):
        passed = Passed(answering(status))
        passed.ask(path, "GET")
        assert (passed.counted.answers, passed.counted.outcomes) == ([(path, status)], [])
    seen = [(record.path, record.status) for record in caplog.records]
    assert seen == [(ANSWERING, 200), ("/health", 503), ("/two%0Alines", 404), (ANSWERING, 200)]
    assert caplog.records[0].request_id == "mine"
    assert "outcome=completed" in caplog.text


def test_lines_of_json(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.configure(Settings(device="cpu", log_format="json", log_requests="summary"))
        logging.getLogger(logs.REQUESTS).info("two\nlines", extra={"request_id": "mine"})
        try:
            raise ValueError("a bug")
        except ValueError:
            logging.getLogger("sglang.somewhere").exception("failed")
    finally:
        root.handlers, root.level = before, level
    first, second = map(json.loads, capfd.readouterr().err.splitlines())
    assert first["message"] == "two\nlines"
    assert first["request_id"] == "mine"
    assert first["level"] == "INFO"
    assert first["logger"] == logs.REQUESTS
    assert first["time"].endswith("+00:00")
    assert "ValueError: a bug" in second["exc_info"]
