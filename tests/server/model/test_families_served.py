"""Tiny models of the served families, in float32: answers equal Transformers'."""

from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
from asking import accepted_tokens
from gguf_models import PROMPT, greedy
from running import ForkedServer, Server

from outrider.server.model.families import SERVED

ALWAYS = ("MistralForCausalLM", "Qwen2MoeForCausalLM", "Gemma2ForCausalLM", "Cohere2ForCausalLM")
ALWAYS += ("ExaoneMoeForCausalLM", "Gemma4ForConditionalGeneration", "Qwen3NextForCausalLM")
ALWAYS += ("Qwen3_5ForConditionalGeneration", "Llama4ForConditionalGeneration")
"""One for each of our changes to SGLang's models: a missing window, experts shared by Triton, capped logits, a window
of another length, Transformers' code and names, layers of several shapes; recurrent layers; chunks."""
ELSEWHERE = {"LLaDA2MoeModelLM", "SDARForCausalLM", "SDARMoeForCausalLM"}
ELSEWHERE |= {"TransformersForCausalLM", "TransformersMoEForCausalLM"}
"""Block diffusion is tested in `tests/lossless/test_diffusion.py`; the rest is in no config.json."""
TOKENS, FEW = 40, [33, 200, 54, 77, 93]
"""Length of an answer, and its only tokens, which repeat, so that much is drafted."""


def test_every_served_family_is_compared_here() -> None:
    assert tiny_families.FAMILIES.keys() | ELSEWHERE == SERVED


@pytest.mark.server
@pytest.mark.parametrize("architecture", tiny_families.FAMILIES)
def test_answers_equal_transformers(architecture: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if architecture not in ALWAYS and not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive starts a server for it")
    model = tiny_families.write(architecture, tmp_path / "tiny")
    flags = ("--max-total-tokens", "512", "--dtype", "float32", "--log-level", "info")
    with ForkedServer(tmp_path / "log", "--model", str(tmp_path / "tiny"), *flags) as server:
        bias = dict.fromkeys(FEW, 100.0)
        free, biased = greedy(model, TOKENS), greedy(model, TOKENS, bias)
        for speculates in (True, False):
            choice = ask(server, speculates, {"logprobs": 3})
            assert choice["token_ids"] == free[0]
            assert_close(choice["logprobs"]["token_logprobs"], free[1])
            assert ask(server, speculates, {"logit_bias": bias})["token_ids"] == biased[0]
        assert accepted_tokens(server) > 0
        one_call = f"{model.config.get_text_config().num_hidden_layers} layers run in one call" in server.output()
        assert one_call == (architecture in tiny_families.IN_ONE_CALL)


def ask(server: Server, speculates: bool, more: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "speculation": {"enabled": speculates}, **more,
    }  # fmt: skip
    return server.post("completions", body)["choices"][0]


def assert_close(served: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(served), torch.tensor(expected), atol=2e-4, rtol=1e-4)
