"""Logprobs of the prompt (`echo` with `logprobs`) equal Transformers', in float32."""

from typing import Any

import pytest
import torch
from asking import MODEL
from running import HTTP, Server
from small_target import SmallTarget
from transformers.convert_slow_tokenizer import bytes_to_unicode

PROMPTS = (
    "The capital of France is Paris, and that of Italy is Rome. "
    "A train travels 60 km in 45 minutes; in two hours at the same speed it travels 160 km.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Naïve 🦊",
)
"""The first is read in several chunks."""
TOP = 5


@pytest.fixture(scope="module")
def expected(small_target: SmallTarget) -> list[torch.Tensor]:
    """Return [tokens, vocabulary] logprobs of the next token for each prompt."""
    with torch.inference_mode():
        texts = [torch.tensor([small_target.tokenizer(prompt).input_ids]) for prompt in PROMPTS]
        return [torch.log_softmax(small_target.model(text).logits[0], -1) for text in texts]


def ask(server: Server, **body: object) -> list[dict]:
    request = {"model": MODEL, "prompt": [*PROMPTS], "echo": True, "logprobs": TOP, "temperature": 0} | body
    answer = HTTP.post(f"{server.url}/v1/completions", json=request, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def written(tokenizer: Any, token: int) -> str:
    """A token's text. Bytes of a partial character become Latin-1 characters."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    spelled = bytes(byte_of[letter] for letter in tokenizer.convert_ids_to_tokens(token))
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return spelled.decode("latin-1")


def test_they_equal_transformers(exact_server: Server, expected: list[torch.Tensor], small_target: SmallTarget) -> None:
    tokenizer = small_target.tokenizer
    for prompt, logprobs, choice in zip(
        PROMPTS, expected, ask(exact_server, max_tokens=2, ignore_eos=True), strict=True
    ):
        ids = tokenizer(prompt).input_ids
        scored = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert len(scored["tokens"]) == len(scored["token_logprobs"]) == len(scored["top_logprobs"]) == len(ids) + 2
        assert scored["token_logprobs"][0] is None
        assert scored["top_logprobs"][0] is None
        right = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored["token_logprobs"][1 : len(ids)]), right, atol=2e-4, rtol=1e-4)
        for top, row in zip(scored["top_logprobs"][1 : len(ids)], logprobs[:-1], strict=True):
            best: dict[str, list[float]] = {}  # several tokens may have one text
            for token, value in zip(row.topk(TOP).indices.tolist(), row.topk(TOP).values.tolist(), strict=True):
                best.setdefault(written(tokenizer, token), []).append(value)
            assert top.keys() == best.keys()
            assert all(any(top[text] == pytest.approx(value, abs=2e-4) for value in best[text]) for text in best)


def test_the_prompt_alone(exact_server: Server, expected: list[torch.Tensor]) -> None:
    """max_tokens 0 scores the prompt; logprobs 0 returns only its own tokens."""
    for prompt, logprobs, choice in zip(PROMPTS, expected, ask(exact_server, max_tokens=0, logprobs=0), strict=True):
        assert choice["text"] == prompt
        assert len(choice["logprobs"]["token_logprobs"]) == len(logprobs)
        assert not choice["logprobs"]["top_logprobs"]


def test_a_cached_prompt_and_a_stream_have_the_same(server: Server) -> None:
    first, again = ask(server, max_tokens=1), ask(server, max_tokens=1)
    assert first == again
    body = {"model": MODEL, "prompt": PROMPTS[0], "echo": True, "logprobs": TOP, "temperature": 0, "max_tokens": 1}
    streamed = [
        chunk.choices[0].logprobs
        for chunk in server.client().completions.create(**body, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
    ]
    assert [value for part in streamed for value in part.token_logprobs] == first[0]["logprobs"]["token_logprobs"]
