"""The server's log: lines of JSON, without any text of a request."""

import json
import uuid
from typing import Any

from asking import MODEL
from running import HTTP, Server, wait_until


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.output().splitlines()]


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    """The line of a request, which may come a moment later."""
    matching: list[dict[str, Any]] = []

    def written() -> bool:
        matching[:] = [line for line in lines(server) if line.get("request_id") == request_id]
        return bool(matching)

    wait_until(written, 30)
    (line,) = matching
    return line


def test_a_clients_id_goes_through_to_the_log(server: Server) -> None:
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": 8, "n": 2, "ignore_eos": True}
    answer = HTTP.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "log-me"}, timeout=60)
    assert answer.headers["X-Request-Id"] == "log-me"
    line = line_of(server, "log-me")
    assert (line["path"], line["status"], line["outcome"]) == ("/v1/completions", 200, "completed")
    assert line["logger"] == "outrider.requests"
    first, second = line["answers"]
    assert answer.json()["id"] in (first["id"], second["id"])
    assert first["completion_tokens"] == second["completion_tokens"] == 8
    assert first["finish_reason"] == "length"
    assert 0 < first["first_token_seconds"] < line["seconds"]
    assert 0 < first["seconds_per_token"] < line["seconds"] / 7


def test_a_refused_request_has_a_line_too(server: Server) -> None:
    answer = HTTP.post(f"{server.url}/v1/completions", json={"max_tokens": -1}, timeout=20)
    assert answer.status_code == 400
    line = line_of(server, answer.headers["X-Request-Id"])
    assert (line["status"], line["outcome"]) == (400, "refused")
    assert "answers" not in line


def test_no_prompt_and_no_answer_is_written(server: Server) -> None:
    secret = f"zebra{uuid.uuid4().hex}"
    for stream in (False, True):
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {secret}"}], "max_tokens": 8}
        answer = HTTP.post(f"{server.url}/v1/chat/completions", json=body | {"stream": stream}, timeout=60)
        line_of(server, answer.headers["X-Request-Id"])
    assert secret not in server.output()
    assert not any({"prompt", "answer"} & set(found) for line in lines(server) for found in line.get("answers", ()))


def test_a_too_long_prompt_logs_only_json(server: Server) -> None:
    """Transformers would warn of it in plain text."""
    body = {"model": MODEL, "prompt": "one two " * 6000, "max_tokens": 8}
    assert HTTP.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 400
    assert lines(server)
