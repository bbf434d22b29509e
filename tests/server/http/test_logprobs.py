"""Logprobs of answers equal SGLang's, and are made off the event loop."""

import json
import math
import random
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from in_loop import in_loop
from sglang.srt.entrypoints.openai.protocol import ChoiceLogprobs
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.utils import to_openai_style_logprobs
from transformers import AutoTokenizer

from outrider.server.http.answers import logprobs
from outrider.server.http.answers.logprobs import DecodedTokens, EchoedPrompt
from outrider.server.model import bundled_model

TOP = 5


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bundled_model.prepare())


@pytest.fixture(scope="module")
def tokens(tokenizer: Any) -> list[int]:
    return [*tokenizer("Naïve 🦊, 𠮷 and\n\tsome code: f(x)").input_ids, tokenizer.eos_token_id, 11, 12]


def yielded(tokens: list[int], tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`meta_info` as our manager keeps it, and as SGLang writes it, with texts."""
    draw, manager, count = random.Random(0), SimpleNamespace(), 40
    logprobs.install(manager)
    ours: dict[str, Any] = {"output_token_logprobs_length": count}
    theirs: dict[str, Any] = {}
    for side in ("input", "output"):
        values: list[float | None] = [-draw.random() for _ in range(count)]
        ids = draw.choices(tokens, k=count)
        top_ids = [draw.choices(tokens, k=TOP) for _ in range(count)]
        top_values = [[-float(place) for place in range(TOP)] for _ in range(count)]
        if side == "input":  # the first token has no logprob
            values[0], top_values[0], top_ids[0] = None, [], []
        ours[f"{side}_token_logprobs"] = manager.detokenize_logprob_tokens(values, ids, True)
        ours[f"{side}_top_logprobs"] = manager.detokenize_top_logprobs_tokens(top_values, top_ids, True)
        theirs[f"{side}_token_logprobs"] = with_texts(tokenizer, values, ids)
        theirs[f"{side}_top_logprobs"] = [
            with_texts(tokenizer, *one) or None for one in zip(top_values, top_ids, strict=True)
        ]
    return ours, theirs


def with_texts(tokenizer: Any, values: list[Any], ids: list[int]) -> list[tuple[Any, int, str]]:
    return [(value, token, tokenizer.decode([token])) for value, token in zip(values, ids, strict=True)]


def test_chat_is_written_as_sglang_writes_it(tokenizer: Any, tokens: list[int]) -> None:
    ours, theirs = yielded(tokens, tokenizer)
    sglang: Any = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=tokenizer))
    expected = OpenAIServingChat._build_token_logprobs_from_raw(
        sglang, theirs["output_token_logprobs"], theirs["output_top_logprobs"]
    )
    tokens_by_id = DecodedTokens(tokenizer)
    written = orjson.loads(orjson.dumps(logprobs.chat_logprobs(tokens_by_id, ours)))
    assert written == ChoiceLogprobs(content=expected).model_dump()
    assert logprobs.chat_models(tokens_by_id, ours["output_token_logprobs"], ours["output_top_logprobs"]) == expected


@pytest.mark.parametrize("prompt", [True, False])
def test_a_completion_is_written_as_sglang_writes_it(tokenizer: Any, tokens: list[int], prompt: bool) -> None:
    ours, theirs = yielded(tokens, tokenizer)
    if not prompt:
        theirs = {name: value for name, value in theirs.items() if name.startswith("output")}
    expected = to_openai_style_logprobs(**theirs, tokenizer=tokenizer).model_dump()
    written = orjson.loads(orjson.dumps(logprobs.text_logprobs(DecodedTokens(tokenizer), ours, prompt=prompt)))
    assert written == expected
    assert any("�" in tokenizer.decode([token]) for token in tokens)


def test_no_top_logprobs_are_none(tokenizer: Any) -> None:
    meta = {"output_token_logprobs": [(-1.5, 11)]}
    assert orjson.loads(orjson.dumps(logprobs.text_logprobs(DecodedTokens(tokenizer), meta, prompt=True))) == {
        "text_offset": [-1], "token_logprobs": [-1.5], "tokens": [tokenizer.decode([11])], "top_logprobs": []
    }  # fmt: skip
    (entry,) = orjson.loads(orjson.dumps(logprobs.chat_logprobs(DecodedTokens(tokenizer), meta)))["content"]
    assert entry["top_logprobs"] == []


def test_an_impossible_token_has_a_null_logprob(tokenizer: Any) -> None:
    """JSON has no infinity."""
    meta = {"output_token_logprobs": [(-1.5, 11)], "output_top_logprobs": [[(-math.inf, 12)]]}
    for fragment in (
        logprobs.text_logprobs(DecodedTokens(tokenizer), meta, prompt=False),
        logprobs.chat_logprobs(DecodedTokens(tokenizer), meta),
    ):
        assert b"null" in orjson.dumps(fragment)


def test_the_table_is_bounded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "MAX_DECODED", 10)
    tokens_by_id = DecodedTokens(tokenizer)
    for token in range(35):
        assert tokens_by_id[token].text == tokenizer.decode([token])
        assert len(tokens_by_id) <= 10


@in_loop
async def test_the_first_chunk_of_each_choice_has_its_prompts(tokenizer: Any, tokens: list[int]) -> None:
    meta, theirs = yielded(tokens, tokenizer)
    contents = [{"index": index, "meta_info": dict(meta)} for index in (0, 1, 0)]
    tokens_by_id = DecodedTokens(tokenizer)
    echoed = EchoedPrompt(tokens_by_id)

    async def stream() -> AsyncGenerator[str, None]:
        for content in contents:
            echoed.add(content)
            assert content["meta_info"]["input_token_logprobs"] == []  # SGLang sees an empty list
            yield f"data: {json.dumps({'choices': [{'index': content['index'], 'logprobs': None}]})}\n\n"
        yield "data: [DONE]\n\n"

    *chunks, end = [chunk async for chunk in echoed.annotate(stream())]
    assert end == "data: [DONE]\n\n"
    first, second, third = (json.loads(chunk.removeprefix("data: "))["choices"][0]["logprobs"] for chunk in chunks)
    assert first == second == to_openai_style_logprobs(**theirs, tokenizer=tokenizer).model_dump()
    assert third is None
