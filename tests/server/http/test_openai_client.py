"""The official client on the real server and model."""

import math

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=16, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == model
    assert answer.usage.completion_tokens <= 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_equals_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": STORY, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**asked, stream=True))
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_of_several_prompts_and_a_stream_of_choices(client: openai.OpenAI, model: str) -> None:
    prompts = ["One, two, three,", "The sky is"]
    several = client.completions.create(model=model, prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert "four" in several.choices[0].text
    asked = {"model": model, "prompt": "Once", "max_tokens": 6, "n": 2, "seed": 1}
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in client.completions.create(**asked).choices] == texts


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=STORY, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(likely.logprob for likely in entry.top_logprobs))
        assert sum(math.exp(likely.logprob) for likely in entry.top_logprobs) <= 1 + 1e-3


def test_streamed_logprobs_cover_every_token(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=STORY, max_tokens=12, temperature=0, logprobs=True, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert "".join(entry.token for entry in entries) == "".join(chunk.delta.content or "" for chunk in chunks)
