"""Requests as real clients build them, each answered, or refused by name.

`dialects/` has a file for each client, recorded or written from its source.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import HTTP, Server

FILES = sorted(Path(__file__).with_name("dialects").glob("*.json"))
LONGEST = {"chat/completions": "max_completion_tokens", "responses": "max_output_tokens"}
"""Fields that bound an answer, by the end of the path; the default is `max_tokens`."""
TOKENS = 8
ENDS = {"message_stop", "response.completed", "response.incomplete"}
FIELDS = {
    "chat/completions": {"choices", "usage"}, "completions": {"choices", "usage"}, "count_tokens": {"input_tokens"},
    "messages": {"content", "stop_reason", "usage"}, "responses": {"output", "status", "usage"},
}  # fmt: skip


def route_of(request: dict[str, Any]) -> str:
    return str(request["path"]).partition("?")[0].removeprefix("/v1/").removeprefix("messages/")


def send(server: Server, request: dict[str, Any]) -> httpx.Response:
    body, route = request.get("body"), route_of(request)
    if body is not None and route != "count_tokens":
        asked = {name: body[name] for name in ("max_tokens", LONGEST.get(route, "max_tokens")) if name in body}
        body = body | (dict.fromkeys(asked, TOKENS) or {LONGEST.get(route, "max_tokens"): TOKENS})
    return HTTP.request(request.get("method", "POST"), server.url + request["path"], json=body, timeout=120)


def check(request: dict[str, Any], answer: httpx.Response) -> None:
    if "status" in request:
        assert answer.status_code == request["status"], answer.text
        assert answer.json()["error"]["param"] == request.get("param")
        return
    assert answer.status_code == 200, answer.text
    if request.get("method") == "HEAD":
        assert not answer.content
    elif request["body"].get("stream"):
        *events, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert last == "[DONE]" or json.loads(last)["type"] in ENDS
        assert events
        assert "error" not in [key for event in events for key, value in json.loads(event).items() if value]
    else:
        assert answer.json().keys() >= FIELDS[route_of(request)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_requests_of_clients_are_answered(tool_server: Server, file: Path) -> None:
    requests = json.loads(file.read_text())["requests"]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: send(tool_server, request), requests))
    for request, answer in zip(requests, answers, strict=True):
        check(request, answer)


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
QUESTION = {"role": "user", "content": "Count."}
ABSENT: dict[str, Any] = {}


def tokens(server: Server, messages: list[dict[str, Any]], status: int = 200, **fields: Any) -> list[int]:
    return server.post("tokenize", {"messages": messages} | fields, status).get("tokens", [])


@pytest.mark.parametrize("rest", [ABSENT, {"tool_calls": [CALL]}], ids=["plain", "calls"])
@pytest.mark.parametrize("after", [[], [QUESTION]], ids=["last", "middle"])
def test_assistants_without_content_are_all_alike(server: Server, rest: dict[str, Any], after: list[Any]) -> None:
    turns = [{"content": ""}, ABSENT, {"content": None}, {"content": []}]
    turns += [{"content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None}]
    if not rest:
        turns += [{"content": None, "tool_calls": []}, {"content": [], "tool_calls": None}]
    prompts = [tokens(server, [QUESTION, {"role": "assistant", **turn, **rest}, *after]) for turn in turns]
    assert prompts.count(prompts[0]) == len(turns)
    for role in ("user", "system"):
        for nothing in (ABSENT, {"content": None}, {"content": []}):
            tokens(server, [{"role": role, **nothing}, *after], status=400)


def test_an_answer_is_continued_with_its_white_space(server: Server) -> None:
    pair = {"continue_final_message": True, "add_generation_prompt": False}
    for end in ("", " ", "\n", "  \n\n", "\t"):
        text = "One, two," + end
        prompt = tokens(server, [QUESTION, {"role": "assistant", "content": text}], **pair)
        said = server.post("detokenize", {"tokens": prompt, "skip_special_tokens": False})
        assert said["text"].endswith("<|im_start|>assistant\n" + text)
        assert prompt == tokens(server, [QUESTION, {"role": "assistant", "content": text}], continue_final_message=True)
    body = {"messages": [QUESTION, {"role": "assistant", "content": "One, two,\n"}], "max_tokens": 4}
    for both in (True, False):
        fields = {"continue_final_message": both, "add_generation_prompt": both}
        assert server.post("chat/completions", body | fields, 400)["error"]["param"] == "add_generation_prompt"
    server.post("chat/completions", body | pair)
    error = server.post("chat/completions", {"messages": [QUESTION]} | pair, 400)["error"]
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("most", [32_000, 10**30])
def test_an_answer_is_bounded_to_what_the_prompt_leaves(server: Server, most: int) -> None:
    """Clients of every API request as much as their own models have."""
    beside = len(tokens(server, [{"role": "user", "content": ""}]))
    messages = [{"role": "user", "content": " no" * (4096 - beside - 64)}]
    ids = tokens(server, messages)
    chat = {"messages": messages, "ignore_eos": True}
    bodies = {
        "chat/completions": [chat, chat | {"max_tokens": most}, chat | {"max_completion_tokens": most}],
        "completions": [{"prompt": ids, "max_tokens": most, "ignore_eos": True}],
        "messages": [chat | {"max_tokens": most}],
        "responses": [{"input": messages, "max_output_tokens": most, "ignore_eos": True}],
    }
    for route, asked in bodies.items():
        for body in asked:
            usage = server.post(route, body)["usage"]
            assert 0 < (usage.get("completion_tokens") or usage["output_tokens"]) <= 4096 - len(ids)
    server.post("chat/completions", chat | {"max_tokens": most, "min_tokens": 100}, 400)


def test_head_has_the_headers_of_get(server: Server) -> None:
    for path in ("/", "/health", "/v1/models", "/docs", "/nowhere"):
        got, head = HTTP.get(server.url + path), HTTP.head(server.url + path)
        assert (head.status_code, head.headers["content-length"]) == (got.status_code, got.headers["content-length"])
        assert not head.content
    assert HTTP.head(f"{server.url}/").status_code == 200
