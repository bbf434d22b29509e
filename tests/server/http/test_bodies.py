"""Bodies made to hurt other clients are refused at once, while other clients are answered.

The limits are those of docs/secure.md; tests allow busy machines five times as long.
"""

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from metrics_page import MetricsPage
from running import HTTP, Server

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


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BUSY = 5
ANSWER_SECONDS, HEALTH_SECONDS = 0.2 * BUSY, 0.1 * BUSY
GROWTH, LEAST_GROWTH = 10, 16 * 2**20
WORK_SECONDS = 0.05
TRIES = 3
"""A real hold repeats each time; on a busy machine many turns may look like one."""
JSON = {"Content-Type": "application/json"}
MEGABYTES = 10**6


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def said(content: Any, count: int = 1) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}] * count


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "top_k beyond 32 bits": (CHAT, body(messages=said("x"), temperature=1, top_k=2**31), "2147483647"),
    "wrong content parts": (CHAT, body(messages=said([{"type": "x"}] * 40_000)), "objects and arrays"),
    "wrong content parts, fewer": (CHAT, body(messages=said([{"type": "x", "t": "y" * 99}] * 4000)), "text only"),
    "parts without a text": (CHAT, body(messages=said([{"type": "text"}] * 5000)), "has to be a string"),
    "prompt of 4 MB": (TEXT, body(prompt="x" * 4 * MEGABYTES), "context length"),
    "message of 4 MB": (CHAT, body(messages=said("a b " * MEGABYTES)), "context length"),
    "stop strings of 4 MB": (TEXT, body(prompt="x", stop=["ab " * 41_666] * 32), "1024 are allowed"),
    "small messages": (CHAT, body(messages=said("a", 80_000)), "objects and arrays"),
    "messages, fewer": (CHAT, body(messages=said("a", 10_000)), "2048 are allowed"),
    "all token ids stop": (TEXT, body(prompt="x", stop_token_ids=[*range(49_152)]), "64 are allowed"),
    "bias of 5,000 digits": (TEXT, body(prompt="x", logit_bias={"9" * 5000: 1}), "token ids"),
    "prompt of 10 MB of token ids": (TEXT, b'{"prompt":[' + b"1," * 5 * MEGABYTES + b"1]}", "values"),
    "escaped characters": (TEXT, b'{"prompt":"' + rb"\u00e9" * 1_700_000 + b'"}', "context length"),
    "keys": (CHAT, json.dumps({f"{i:07}": 1 for i in range(700_000)}).encode(), "strings and keys"),
    "long key": (CHAT, body(**{"x" * 10 * MEGABYTES: 1}), "unknown field"),
    "long role": (CHAT, body(messages=[{"role": "x" * 10 * MEGABYTES}]), "role"),
    "empty arrays": (CHAT, b'{"messages":[' + b"[]," * 3 * MEGABYTES, "objects and arrays"),
    "wrong stop strings": (TEXT, body(prompt="x", stop=[1] * 80_000), "32 are allowed"),
    "wrong blocks": (MESSAGES, body(messages=said([{"type": "x"}] * 5, 2048), max_tokens=1), "takes"),
    "blocks without a text": (MESSAGES, body(messages=said([{"type": "text"}] * 5000), max_tokens=1), "required"),
    "items": (RESPONSES, body(input=said("a", 8_000)), "2048"),
    "wrong items": (RESPONSES, body(input=[{"role": "user", "content": [{"type": "x"}] * 5}] * 2048), "takes"),
    "token ids to detokenize": ("/v1/detokenize", body(tokens=[[11] * 5000] * 16), "context length"),
    "wrong prompts": (TEXT, body(prompt=[[None] * 1000] * 16), "token ids"),
}


def seen_in_time(server: Server, route: str, content: bytes, in_time: Callable[[Observed], bool]) -> Observed:
    """The first of TRIES that is in time and does not hold the event loop, else the last."""
    for _ in range(TRIES):
        before = long_works(server)
        seen = send(server, route, content)
        if in_time(seen) and long_works(server) == before:
            return seen
    pytest.fail(f"in none of {TRIES} tries: answered in {seen.seconds:.2f} s, /health in {seen.health_seconds:.2f} s")


def long_works(server: Server) -> float:
    """Count the times that the event loop worked too long without a break."""
    page, name = MetricsPage(server.url), "outrider_event_loop_work_seconds"
    return page.value(f"{name}_count") - page.value(f"{name}_bucket", le=str(2 * WORK_SECONDS))


@pytest.mark.parametrize("name", REFUSED)
def test_too_large_bodies_are_refused_at_once_and_delay_no_client(server: Server, name: str) -> None:
    route, content, message = REFUSED[name]
    most = ANSWER_SECONDS * max(1, len(content) / (4 * MEGABYTES))
    in_time = lambda seen: seen.seconds < most and seen.health_seconds < HEALTH_SECONDS  # noqa: E731
    seen = seen_in_time(server, route, content, in_time)
    assert seen.answer.status_code == 400, seen.answer.text
    assert message in seen.answer.json()["error"]["message"]
    assert len(seen.answer.content) < 1000
    assert seen.grown_bytes < max(LEAST_GROWTH, GROWTH * len(content))


def characters(count: int) -> str:
    """Characters that are several tokens each."""
    draw = random.Random(1)
    return "".join(chr(draw.randint(0x4E00, 0x9FFF)) for _ in range(count))


WORK: dict[str, tuple[str, bytes]] = {
    "tokens that are rare": (TEXT, body(prompt=characters(300_000), max_tokens=1)),
    "digits": (TEXT, body(prompt="1" * 600_000, max_tokens=1)),
    "spaces": (TEXT, body(prompt=" " * 600_000, max_tokens=1)),
    "messages": (CHAT, body(messages=said("a", 2048), max_tokens=1)),
    "messages of Anthropic's": (MESSAGES, body(messages=said("a", 2048), max_tokens=1)),
    "items": (RESPONSES, body(input=said("a", 2048))),
    "digits to tokenize": ("/v1/tokenize", body(prompt="1" * 600_000)),
    "prompts": (TEXT, body(prompt=["the capital of France is " * 900] * 16, max_tokens=1)),
    "token ids": (TEXT, body(prompt=[[11] * 4096] * 16, max_tokens=1)),
}
"""Bodies of the maximum size with requests that do not fit."""


@pytest.mark.parametrize("name", WORK)
def test_much_work_is_done_off_the_event_loop(server: Server, name: str) -> None:
    seen = seen_in_time(server, *WORK[name], lambda seen: seen.health_seconds < HEALTH_SECONDS)
    assert seen.answer.status_code == 400
    assert "context length" in seen.answer.json()["error"]["message"]


ANSWERS: dict[str, tuple[str, bytes]] = {
    "chat": (
        CHAT,
        body(messages=said("Count."), temperature=0, max_tokens=700, min_tokens=700, logprobs=True, top_logprobs=20),
    ),
    "prompt": (TEXT, body(prompt="one two three " * 1000, echo=True, logprobs=20, max_tokens=1)),
    "streamed prompt": (TEXT, body(prompt="one two four " * 1000, echo=True, logprobs=20, max_tokens=1, stream=True)),
}
"""Answers with logprobs that SGLang would write in 0.2 to 0.5 s on the event loop."""


@pytest.mark.parametrize("name", ANSWERS)
def test_long_answers_are_written_off_the_event_loop(server: Server, name: str) -> None:
    route, content = ANSWERS[name]
    for _ in range(TRIES):
        before = long_works(server)
        answer = HTTP.post(server.url + route, content=content, headers=JSON, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.text.count(",") > 40_000
        if long_works(server) == before:
            break
    assert long_works(server) == before


def test_a_large_request_is_answered_like_a_small_one(server: Server) -> None:
    """A body prepared in a thread gives the same answer."""
    small = {"messages": said("Count: 1, 2, 3,"), "max_tokens": 12, "temperature": 0}
    large = small | {"user": "x" * 4096, "logit_bias": {str(i): 0 for i in range(1000)}}
    answers = [server.post("chat/completions", fields)["choices"][0]["message"] for fields in (small, large)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("padding", ["", "y" * 5000], ids=["on the loop", "in a thread"])
def test_a_template_that_fails_is_the_clients_error(server: Server, padding: str) -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]
    messages = [*said("x"), {"role": "assistant", "tool_calls": calls}, {"role": "user", "content": f"z{padding}"}]
    error = server.post("chat/completions", {"messages": messages, "max_tokens": 1}, 400)["error"]
    assert "JSON object" in error["message"]
