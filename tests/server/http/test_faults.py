"""Dying processes, signals to stop, and missing keys."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from browser import chromium
from playwright.sync_api import expect
from running import HTTP, ForkedServer, Server, wait_until
from small_target import SmallTarget

KEY = "a-secret"
LONG = {"prompt": "Count: 1, 2, 3,", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
LONG["speculation"] = {"enabled": False}
"""A second's work."""


class Stream:
    """A streamed completion, read in a thread; `begun` is set at its first token."""

    def __init__(self, server: Server, tokens: int, **headers: str) -> None:
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.server = server
        self.body = LONG | {"stream": True, "max_tokens": tokens}
        self.headers = headers
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        assert self.begun.wait(60)

    def _read(self) -> None:
        url = self.server.url + "/v1/completions"
        with HTTP.stream("POST", url, json=self.body, headers=self.headers, timeout=120) as response:
            for line in response.iter_lines():
                self.begun.set()
                self.lines += [line.removeprefix("data: ")] if line else []

    def finish(self) -> list[str]:
        self.thread.join(90)
        assert not self.thread.is_alive(), "the stream hangs"
        return self.lines


@pytest.fixture
def own_server(tmp_path: Path, small_target: SmallTarget) -> Iterator[Server]:
    flags = (*small_target.flags(), "--max-total-tokens", "4096", "--drain-seconds", "60")
    with ForkedServer(tmp_path / "log", *flags) as started:
        yield started


def test_a_killed_scheduler_ends_all_with_an_error(own_server: Server) -> None:
    children = own_server.children()
    whole = ThreadPoolExecutor(1).submit(HTTP.post, own_server.url + "/v1/completions", json=LONG, timeout=120)
    stream = Stream(own_server, 900)
    children["scheduler"].suspend()
    time.sleep(0.2)
    assert not whole.done()
    children["scheduler"].kill()
    killed = time.monotonic()
    wait_until(lambda: own_server.status("/health") == 503, 2)
    assert time.monotonic() - killed < 2
    assert own_server.status("/ready") == 503

    lines = stream.finish()
    assert "scheduler" in json.loads(lines[-2])["error"]["message"]
    assert lines[-1] == "[DONE]"
    answer = whole.result(30)
    assert answer.status_code == 500  # not 503, which proxies try elsewhere
    assert answer.json()["error"]["type"] == "server_error"

    assert own_server.process.wait(30) == 1
    assert "Traceback" not in own_server.output()
    wait_until(lambda: not any(child.is_running() for child in children.values()), 30)


@pytest.mark.server
def test_a_failing_detokenizer_ends_all_with_an_error(tmp_path: Path, small_target: SmallTarget) -> None:
    """SGLang's detokenizer has room for fewer requests than there are."""
    flags = (*small_target.flags("off"), "--max-total-tokens", "4096")
    with ForkedServer(tmp_path / "log", *flags, SGLANG_DETOKENIZER_MAX_STATES="1") as broken:
        children = broken.children()
        assert [*children] == ["scheduler"]
        answer = HTTP.post(broken.url + "/v1/completions", json=LONG | {"n": 2}, timeout=60)
        assert answer.status_code == 500
        assert "the server is restarting" in answer.json()["error"]["message"]
        assert broken.process.wait(30) == 1
        assert broken.output().count("RuntimeError: Decode status not found") == 1
        wait_until(lambda: not any(child.is_running() for child in children.values()), 5)


def test_first_signal_drains_and_exits_with_zero(own_server: Server) -> None:
    children = own_server.children()
    stream = Stream(own_server, 900)
    own_server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: own_server.status("/ready") == 503, 30)
    assert own_server.status("/health") == 200
    refused = HTTP.post(own_server.url + "/v1/completions", json=LONG)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "unavailable"

    lines = stream.finish()
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
    assert own_server.process.wait(30) == 0
    assert not any(child.is_running() for child in children.values())


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("locked") / "log"
    with ForkedServer(log, *small_target.flags("off"), "--max-total-tokens", "4096", "--api-key", KEY) as started:
        yield started


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(locked_server: Server) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(locked_server.url)
        dialog = page.locator("#key")
        for key in ("wrong", KEY):
            expect(dialog).to_be_visible()
            page.locator("#key-value").fill(key)
            page.locator("#key-value").press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        expect(dialog).not_to_be_visible()
        page.locator("#prompt").fill("Hello")
        page.locator("#prompt").press("Enter")
        expect(page.locator(".text .token.target").first).to_be_attached(timeout=20_000)
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert page.evaluate(f"JSON.stringify(localStorage).includes({KEY!r})") is False


def test_a_server_with_a_key_and_without_a_drafter_answers(locked_server: Server) -> None:
    client, headers = locked_server.client(api_key=KEY), {"Authorization": f"Bearer {KEY}"}
    asked = {"model": client.models.list().data[0].id, "prompt": "1 2 3 1 2 3 1", "max_tokens": 8}
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 0
    page = HTTP.get(locked_server.url + "/metrics", headers=headers).text
    assert "outrider_drafted_tokens_total 0.0" in page
    assert "outrider_decode_steps_total 0.0" not in page
    paths = ("/v1/models", "/metrics", "/nothing", "/health", "/ready")
    assert [locked_server.status(path) for path in paths] == [401, 401, 401, 200, 200]


def test_second_signal_stops_at_once(locked_server: Server) -> None:
    stream = Stream(locked_server, 900, Authorization=f"Bearer {KEY}")
    locked_server.process.send_signal(signal.SIGINT)
    wait_until(lambda: locked_server.status("/ready") == 503, 30)
    assert stream.thread.is_alive()
    locked_server.process.send_signal(signal.SIGINT)
    assert "stopping" in json.loads(stream.finish()[-2])["error"]["message"]
    assert locked_server.process.wait(60) == 0


@pytest.mark.server
def test_parent_killed_while_loading_leaves_no_orphans(tmp_path: Path) -> None:
    started = Server(tmp_path / "log")
    try:
        parent = psutil.Process(started.process.pid)
        wait_until(lambda: len(parent.children()) >= 2, 120)
        children = parent.children()
        started.process.kill()
        started.process.wait(60)
        wait_until(lambda: not any(alive(child) for child in children), 60)
    finally:
        started.kill()


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
