"""/v1/tokenize returns the model's input, /v1/detokenize the text of token ids."""

from typing import Any

import openai
import pytest
from running import HTTP, Server

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue? " * 200}]


def ask(server: Server, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = HTTP.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_messages_have_the_tokens_that_a_chat_has(server: Server, client: openai.OpenAI, model: str) -> None:
    tokenized = ask(server, "tokenize", {"messages": QUESTION, "model": model})
    used = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=1).usage
    assert tokenized["count"] == len(tokenized["tokens"]) == used.prompt_tokens
    assert tokenized["max_model_len"] == 4096
    told = client.completions.create(model=model, prompt=tokenized["tokens"], max_tokens=8, temperature=0)
    chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
    assert told.choices[0].text == chat.choices[0].message.content


def test_prompts_there_and_back(server: Server) -> None:
    single = ask(server, "tokenize", {"prompt": "One, two, 三。"})
    several = ask(server, "tokenize", {"prompt": ["One, two, 三。", "Four"], "add_special_tokens": False})
    assert several["tokens"][0] == single["tokens"]
    assert several["count"] == [single["count"], len(several["tokens"][1])]
    assert ask(server, "detokenize", {"tokens": single["tokens"]}) == {"text": "One, two, 三。"}
    assert ask(server, "detokenize", {"tokens": several["tokens"]}) == {"text": ["One, two, 三。", "Four"]}
    ends = ask(server, "tokenize", {"prompt": "<|im_end|>"})["tokens"]
    assert ask(server, "detokenize", {"tokens": ends}) == {"text": ""}
    assert ask(server, "detokenize", {"tokens": ends, "skip_special_tokens": False}) == {"text": "<|im_end|>"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": QUESTION}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "temperature": 1}, 400, "temperature"),
        ("tokenize", {"prompt": [1, 2]}, 400, "prompt"),
        ("tokenize", {"prompt": "no " * 300_000}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("tokenize", {"messages": [{"role": "user", "content": 1}]}, 400, "messages[0].content"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": []}, 400, "tokens"),
        ("detokenize", {"tokens": "a"}, 400, "tokens"),
        ("detokenize", {"tokens": [1, 10**9]}, 400, "tokens"),
        ("detokenize", {"tokens": [1] * 5000}, 400, "tokens"),
        ("detokenize", {"tokens": [[1], 2]}, 400, "tokens"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    server: Server, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    error = ask(server, path, body, status)["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"] or "context length" in error["message"] or status == 404
