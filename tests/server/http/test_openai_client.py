"""The official client on the real server and model."""

import json
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


def test_completion_and_its_stream(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    assert "four" in whole.choices[0].text
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == whole.choices[0].text


def test_completion_of_several_prompts_and_of_token_ids(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "max_tokens": 6, "temperature": 0}
    several = client.completions.create(prompt=["One, two, three,", "The sky is"], **asked)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert "four" in several.choices[0].text
    ids = client.completions.create(prompt=[1, 2, 3], **asked)
    assert ids.usage.prompt_tokens == 3


def test_echo(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="The sky is", max_tokens=3, echo=True)
    assert answer.choices[0].text.startswith("The sky is")


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


def test_completion_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="One, two,", max_tokens=5, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 5
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_streamed_logprobs_cover_every_token(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=STORY, max_tokens=12, temperature=0, logprobs=True, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert "".join(entry.token for entry in entries) == "".join(chunk.delta.content or "" for chunk in chunks)


def test_json_schema(client: openai.OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Invent a person."}], max_tokens=64, temperature=1, seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )  # fmt: skip
    person = json.loads(answer.choices[0].message.content)
    assert person["name"] in ("Ann", "Bob")
    assert 10 <= person["age"] <= 99


def test_seed_repeats_an_answer(client: openai.OpenAI, model: str) -> None:
    def answer(seed: int) -> str:
        asked = {"model": model, "messages": STORY, "max_tokens": 12, "temperature": 1.0}
        return client.chat.completions.create(**asked, seed=seed).choices[0].message.content

    assert answer(11) == answer(11)
    assert len({answer(seed) for seed in range(11, 15)}) > 1


def test_n_choices_differ_even_with_one_seed(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": STORY, "max_tokens": 12, "temperature": 1.0, "n": 3}
    for seeded in ({}, {"seed": 5}):
        answer = client.chat.completions.create(**asked, **seeded)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert answer.usage.completion_tokens <= 36
    again = client.chat.completions.create(**asked, seed=5)
    assert [choice.message.content for choice in again.choices] == texts


def test_n_choices_stream(client: openai.OpenAI, model: str) -> None:
    stream = client.completions.create(model=model, prompt="Once", max_tokens=6, n=2, seed=1, stream=True)
    texts = {0: "", 1: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    whole = client.completions.create(model=model, prompt="Once", max_tokens=6, n=2, seed=1)
    assert [choice.text for choice in whole.choices] == [texts[0], texts[1]]


def test_stop(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "One, two, three, four,", "max_tokens": 24, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    assert "six" in free
    stopped = client.completions.create(**asked, stop=["six"]).choices[0]
    assert stopped.text == free[: free.index("six")]
    assert stopped.finish_reason == "stop"


def test_logit_bias_and_penalties_change_the_answer(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "la la la la la la", "max_tokens": 12, "temperature": 0}
    free = client.completions.create(**asked).choices[0].text
    penalised = client.completions.create(**asked, presence_penalty=2.0, frequency_penalty=2.0).choices[0].text
    assert penalised != free
    # A bias of 100 makes token 28 certain at every position.
    biased = client.completions.create(**asked, logit_bias={"28": 100}, logprobs=0).choices[0]
    assert len(set(biased.logprobs.tokens)) == 1


def test_speculation_can_be_switched_off_for_a_request(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "a b c a b c a b c a b", "max_tokens": 16, "temperature": 0}
    details = {"return_spec_tokens_details": True}
    drafted = client.completions.create(**asked, extra_body=details)
    plain = client.completions.create(**asked, extra_body=details | {"speculation": {"enabled": False}})
    assert drafted.sglext["spec_tokens_details"]["spec_num_correct_drafts"] > 0
    assert plain.sglext["spec_tokens_details"]["spec_num_correct_drafts"] == 0
    assert len(plain.choices[0].text) > 0


def test_error_classes(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=STORY, n=1000)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=STORY)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=model, prompt="no " * 5000)
    assert long.value.code == "context_length_exceeded"
