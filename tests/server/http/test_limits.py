"""A server with limits under too many requests. The last test ends the server."""

import json
import os
import re
import signal
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from socket import AF_UNIX
from typing import Any

import httpx
import psutil
import pytest
from asking import unread
from limited import (
    CONNECTIONS,
    DAY_TOKENS,
    LONG,
    MINUTE_TOKENS,
    QUEUED,
    REQUEST_SECONDS,
    REQUEST_TOKENS,
    RUNNING,
    SHORT,
    STALL_SECONDS,
    Limited,
    code,
    usage_of,
)
from running import HTTP, wait_until

from outrider.server.http.keys import key_file, usage_file


@pytest.fixture(scope="module")
def limited_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    limited = Limited(tmp_path_factory.mktemp("limited"))
    try:
        limited.server.wait_until_ready()
        yield limited
    finally:
        limited.client.close()
        limited.server.kill()


@pytest.fixture(autouse=True)
def idle(limited_server: Limited) -> None:
    """Wait for the end of the previous test's requests."""
    wait_until(limited_server.idle, 30)


def test_metrics_have_a_port_of_their_own_and_no_key(limited_server: Limited) -> None:
    url = f"http://127.0.0.1:{limited_server.metrics_port}"
    assert "sglang:num_running_reqs" in HTTP.get(f"{url}/metrics").text
    assert HTTP.get(f"{url}/health").status_code == HTTP.get(f"{url}/ready").status_code == 200
    assert HTTP.get(f"{url}/v1/models").status_code == 404
    operator = limited_server.headers["operator"]
    assert HTTP.get(f"{limited_server.server.url}/metrics", headers=operator).status_code == 404


def test_traffic_between_processes_is_private_to_this_user(limited_server: Limited) -> None:
    """The files are in this user's folder, and torch's collectives stay on this machine."""
    main = psutil.Process(limited_server.server.process.pid)
    connections = [*main.net_connections("all")]
    assert limited_server.server.port in [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
    for child in main.children(recursive=True):
        opened = child.net_connections("all")
        assert limited_server.server.port not in [each.laddr.port for each in opened if each.status == "LISTEN"]
        connections += opened
    files = {Path(each.laddr) for each in connections if isinstance(each.laddr, str) and each.laddr[:1] == "/"}
    assert len(files) >= 2
    for folder in {path.parent for path in files}:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.geteuid()

    listening = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN and each.family != AF_UNIX]
    assert limited_server.metrics_port in {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_choices_weigh_as_requests_do(limited_server: Limited) -> None:
    """More choices than its key or the server allows refuse the whole request."""
    refused = limited_server.ask("two", SHORT | {"n": 3})
    assert (refused.status_code, code(refused)) == (400, "too_many_choices")
    refused = limited_server.ask("operator", SHORT | {"prompt": [SHORT["prompt"]] * 3, "n": 3})
    assert (refused.status_code, code(refused)) == (400, "too_many_choices")
    assert "9 choices" in refused.json()["error"]["message"]
    with limited_server.stream("two", LONG | {"n": 2}) as stream:
        assert stream.status_code == 200
        assert code(limited_server.ask("two")) == "concurrency_limit_exceeded"
        # Two of the eight places are taken.
        assert code(limited_server.ask("operator", SHORT | {"n": 7})) == "queue_full"
    wait_until(lambda: limited_server.ask("two", SHORT | {"n": 2}).status_code == 200, 30)
    wait_until(limited_server.idle, 30)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"seed": 1}, {"prompt": ["1 2 3", "4 5 6"], "n": 2}])
def test_choices_free_their_places(limited_server: Limited, more: dict[str, Any]) -> None:
    answers = [limited_server.ask("operator", SHORT | {"n": 4, "temperature": 1} | more) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert limited_server.ask("operator", SHORT | {"n": RUNNING + QUEUED}).status_code == 200


def test_a_key_never_exceeds_its_tokens(limited_server: Limited) -> None:
    """All concurrent requests would end below the limit, and still count in full."""
    body = SHORT | {"max_tokens": 50, "stop": ["1"]}  # reserves more than it uses
    answers = limited_server.ask_all("minute", 8, body)
    assert set(map(code, answers)) == {None, "token_limit_exceeded"}
    given = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
    for answer in answers:
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert answer.json()["error"]["type"] == "rate_limit_error"
    last = limited_server.ask("minute", body)
    assert last.status_code == 200
    assert last.headers["x-ratelimit-limit-tokens"] == str(MINUTE_TOKENS)
    given.append(last.json()["usage"]["total_tokens"])
    refused = limited_server.ask("minute", SHORT | {"max_tokens": MINUTE_TOKENS - 20})
    assert code(refused) == "token_limit_exceeded"
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) == MINUTE_TOKENS - sum(given)
    assert re.fullmatch(r"1m0s|[0-9]+s", refused.headers["x-ratelimit-reset-tokens"])
    assert code(limited_server.ask("minute", SHORT | {"max_tokens": MINUTE_TOKENS})) == "request_too_many_tokens"


def test_usage_is_that_of_the_answers(limited_server: Limited) -> None:
    """Metrics count it by key and the log by request, for any number of choices and prompts."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "stream": True}
    bodies: list[dict[str, Any]] = [
        SHORT,
        SHORT | {"n": 3, "temperature": 1},
        SHORT | {"n": 2, "temperature": 1, "seed": 5},
        SHORT | {"prompt": ["1 2 3", "4 5 6 7"], "n": 2, "temperature": 1},
        SHORT | {"prompt": [1, 2, 3, 4]},
        SHORT | {"stream": True, "stream_options": {"include_usage": True}},
        chat | {"stream_options": {"include_usage": True}},
        SHORT | {"max_tokens": -1},
    ]
    for body in bodies:
        before = limited_server.used("operator")
        answer = limited_server.ask("operator", body, "chat/completions" if "messages" in body else "completions")
        usage = usage_of(answer) if answer.status_code == 200 else {"prompt_tokens": 0, "completion_tokens": 0}
        after = limited_server.used("operator")
        assert after["prompt"] - before["prompt"] == usage["prompt_tokens"], body
        assert after["completion"] - before["completion"] == usage["completion_tokens"], body
        assert after["cached"] - before["cached"] <= usage["prompt_tokens"], body
        logged = limited_server.logged(answer)
        assert "key=operator" in logged
        counted = all(f"{kind}={usage[kind]}" in logged for kind in ("prompt_tokens", "completion_tokens"))
        assert counted == (answer.status_code == 200), logged


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}),
        ("responses", {"input": "Hi", "max_output_tokens": 6}),
    ],
)
def test_other_apis_are_charged_alike(limited_server: Limited, path: str, body: dict[str, Any], stream: bool) -> None:
    url = f"{limited_server.server.url}/v1/{path}"
    key = limited_server.headers["operator"]["Authorization"].removeprefix("Bearer ")
    before = limited_server.used("operator")
    answer = limited_server.client.post(url, json=body | {"stream": stream}, headers={"x-api-key": key})
    assert answer.status_code == 200
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    told = (events[-2] if path == "messages" else events[-1]["response"]) if stream else answer.json()
    usage, after = told["usage"], limited_server.used("operator")
    assert after["prompt"] - before["prompt"] == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert after["completion"] - before["completion"] == usage["output_tokens"]
    refused = limited_server.client.post(url, json=body)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert refused.json().get("type") == ("error" if path == "messages" else None)
    long = body | {name: 100 for name in body if name.startswith("max")}
    much = limited_server.ask("short", long, path)
    assert code(much) == "request_too_many_tokens"
    assert much.json()["error"]["param"] in body


def test_an_aborted_answer_counts_as_far_as_it_was_written(limited_server: Limited) -> None:
    with limited_server.stream("day", LONG) as stream:
        chunks = stream.iter_lines()
        for _ in range(20):
            next(chunks)
        taken = DAY_TOKENS - int(stream.headers["x-ratelimit-remaining-tokens"])
        assert taken > LONG["max_tokens"]  # at least its maximum
    wait_until(lambda: limited_server.used("day")["prompt"] > 0, 30)
    used = limited_server.used("day")
    assert 5 <= used["completion"] < LONG["max_tokens"]
    left = limited_server.ask("day", SHORT | {"max_tokens": 1}).headers["x-ratelimit-remaining-tokens"]
    assert DAY_TOKENS - int(left) == used["prompt"] + used["completion"] + used["prompt"] + 1


def test_a_request_has_as_many_tokens_as_it_may(limited_server: Limited) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    answer = limited_server.ask("short", chat, "chat/completions").json()
    assert answer["usage"]["total_tokens"] == 40
    assert answer["choices"][0]["finish_reason"] == "length"
    for name, most in (("short", 40), ("operator", REQUEST_TOKENS)):
        refused = limited_server.ask(name, SHORT | {"max_tokens": most, "stream": True})
        assert (refused.status_code, code(refused)) == (400, "request_too_many_tokens")
        assert f"may have {most}" in refused.json()["error"]["message"]
    refused = limited_server.ask("short", SHORT | {"max_tokens": 10, "n": 4, "temperature": 1})
    assert code(refused) == "request_too_many_tokens"


def test_beyond_the_queue_requests_are_refused_and_the_rest_answered(limited_server: Limited) -> None:
    """There are four times as many clients as places."""
    body = LONG | {"max_tokens": 40}
    alone = limited_server.ask("operator", body).json()["choices"][0]["text"]
    answers = limited_server.ask_all("operator", 4 * (RUNNING + QUEUED), body)
    codes = Counter(map(code, answers))
    assert set(codes) == {None, "queue_full"}
    assert codes[None] >= RUNNING
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == alone
        else:
            assert answer.status_code == 429
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["Retry-After"]) >= 1


def test_requests_that_wait_or_run_too_long_are_ended(limited_server: Limited) -> None:
    streamed = LONG | {"stream": True}
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(limited_server.ask, "operator", body) for body in (LONG, LONG, streamed, LONG)]
        wait_until(lambda: limited_server.metrics().value("sglang:num_running_reqs") == RUNNING, 30)
        waiting = [pool.submit(limited_server.ask, "operator", body) for body in (SHORT, SHORT | {"stream": True})]
        for late in (future.result() for future in waiting):
            assert (late.status_code, code(late), late.headers["Retry-After"]) == (429, "queue_timeout", "1")
        answers = [future.result() for future in running]
    stream = answers.pop(2)
    for answer in answers:
        assert (answer.status_code, code(answer)) == (504, "request_timeout")
        assert answer.json()["error"]["type"] == "timeout_error"
    *_, error, last = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    assert (stream.status_code, json.loads(error)["error"]["code"], last) == (200, "request_timeout", "[DONE]")


def test_a_client_that_reads_nothing_is_ended(limited_server: Limited) -> None:
    """Its answer exceeds the system's buffers."""
    messages = [{"role": "user", "content": "Count."}]
    body = {"messages": messages, "max_tokens": 3000, "ignore_eos": True, "temperature": 0, "stream": True}
    body |= {"logprobs": True, "top_logprobs": 20}
    with unread(limited_server.server, "/v1/chat/completions", body, **limited_server.headers["two"]) as client:
        ours = client.getsockname()[1]
        server = psutil.Process(limited_server.server.process.pid)

        def connected() -> bool:
            connections = [c for c in server.net_connections("tcp") if c.raddr and c.raddr.port == ours]
            return any(connection.status == psutil.CONN_ESTABLISHED for connection in connections)

        wait_until(connected, 30)
        wait_until(lambda: not connected(), 2 * REQUEST_SECONDS + STALL_SECONDS)
        wait_until(limited_server.idle, 30)


def test_connections_are_limited_and_counted(limited_server: Limited) -> None:
    address = ("127.0.0.1", limited_server.server.port)
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address, 10)) for _ in range(CONNECTIONS + 1)]
        assert clients[-1].recv(64).startswith(b"HTTP/1.1 503 ")
        page = limited_server.metrics()
        assert page.value("outrider_open_connections") == CONNECTIONS
        assert 1 <= page.value("outrider_refused_connections_total") < CONNECTIONS
    wait_until(lambda: limited_server.metrics().value("outrider_open_connections") < CONNECTIONS / 2, 30)
    assert HTTP.get(f"{limited_server.server.url}/ready").status_code == 200


def test_a_running_server_takes_up_changed_keys(limited_server: Limited) -> None:
    def status(name: str) -> int:
        return HTTP.get(f"{limited_server.server.url}/v1/models", headers=limited_server.headers[name]).status_code

    whole, key = limited_server.file.read_text(), limited_server.make("new")
    assert status("new") == 401
    key_file.add(limited_server.file, key)
    wait_until(lambda: status("new") == 200, 30)
    limited_server.file.write_text("[two")
    wait_until(lambda: "the API keys stay as they were" in limited_server.server.output(), 30)
    assert status("new") == 200
    limited_server.file.write_text(whole)
    wait_until(lambda: status("new") == 401, 30)
    assert status("two") == 200


def test_a_stopping_server_answers_all_accepted_requests(limited_server: Limited) -> None:
    count, taken = RUNNING + QUEUED // 2, list[Future[httpx.Response]]()
    answered = lambda: any(each.done() for each in taken)  # noqa: E731
    with ThreadPoolExecutor(count) as pool:
        for length in (32, 64, 128, 256, 512):  # until they outlast the check
            body = LONG | {"max_tokens": length}
            taken = [pool.submit(limited_server.ask, "operator", body) for _ in range(count)]
            wait_until(lambda: limited_server.in_flight() == count or answered(), 30)
            if not answered():
                break
            wait(taken)
        limited_server.server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: limited_server.server.status("/ready") in (503, None), 30)
        answers = [future.result() for future in taken]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {body["max_tokens"]}
    assert limited_server.server.process.wait(30) == 0
    assert usage_file.read(limited_server.usage_file)[1].keys() >= {"operator", "minute", "day", "short"}
