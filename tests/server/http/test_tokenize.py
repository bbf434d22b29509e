"""/v1/tokenize returns the model's input, /v1/detokenize the text of token ids."""

from typing import Any

import openai
import pytest
from running import Server

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue? " * 200}]
WRONG_TOKENS: list[Any] = [[], "a", [1, 10**9], [1] * 5000, [[1], 2]]


def test_messages_have_the_tokens_that_a_chat_has(server: Server, client: openai.OpenAI, model: str) -> None:
    tokenized = server.post("tokenize", {"messages": QUESTION, "model": model})
    used = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=1).usage
    assert tokenized["count"] == len(tokenized["tokens"]) == used.prompt_tokens
    assert tokenized["max_model_len"] == 4096
    told = client.completions.create(model=model, prompt=tokenized["tokens"], max_tokens=8, temperature=0)
    chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
    assert told.choices[0].text == chat.choices[0].message.content


def test_prompts_there_and_back(server: Server) -> None:
    single = server.post("tokenize", {"prompt": "One, two, 三。"})
    several = server.post("tokenize", {"prompt": ["One, two, 三。", "Four"], "add_special_tokens": False})
    assert several["tokens"][0] == single["tokens"]
    assert several["count"] == [single["count"], len(several["tokens"][1])]
    assert server.post("detokenize", {"tokens": single["tokens"]}) == {"text": "One, two, 三。"}
    assert server.post("detokenize", {"tokens": several["tokens"]}) == {"text": ["One, two, 三。", "Four"]}
    ends = server.post("tokenize", {"prompt": "<|im_end|>"})["tokens"]
    assert server.post("detokenize", {"tokens": ends}) == {"text": ""}
    assert server.post("detokenize", {"tokens": ends, "skip_special_tokens": False}) == {"text": "<|im_end|>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": QUESTION}, "prompt"),
        ("tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("tokenize", {"prompt": [1, 2]}, "prompt"),
        ("tokenize", {"prompt": "no " * 300_000}, "prompt"),
        ("tokenize", {"prompt": "a", "model": "gpt-9"}, "model"),
        ("tokenize", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        *(("detokenize", body, "tokens") for body in ({}, *({"tokens": wrong} for wrong in WRONG_TOKENS))),
    ],
)
def test_wrong_fields_are_refused_by_name(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    status = 404 if param == "model" else 400
    error = server.post(path, body, status)["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"] or "context length" in error["message"] or status == 404
