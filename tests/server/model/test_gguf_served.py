"""Tiny GGUF files, served in float32: answers equal transformers'."""

from pathlib import Path

import gguf_models
import pytest
import torch
from gguf_models import PROMPT
from running import ForkedServer

SERVED = (
    "qwen3moe", "qwen3", "qwen2", "smollm3", "granite", "gemma3", "phi3", "phi3-long", "phi3-partial", "olmo2", "yarn",
)  # fmt: skip
ALWAYS = ("qwen3moe", "qwen3")
TURN_END = "qwen3"
"""Its file names only the token that ends a turn."""
IN_ONE_CALL = ("qwen3", "qwen2")
"""Models with all layers in one call (`server/plugin/cpu/fused_model.py`)."""
FLAGS = {"phi3-partial": ("--context-length", "256")}
"""Its original context, so that its factors for short texts are used."""
TOKENS = 16


@pytest.mark.server
@pytest.mark.parametrize("name", SERVED)
def test_answers_equal_transformers(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name not in ALWAYS and not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive starts a server for it")
    file = tmp_path / "tiny.gguf"
    model = gguf_models.write(name, file, "Q8_0")
    ids, expected = gguf_models.greedy(model, TOKENS)
    whole = max(i for i in range(TOKENS) if ids[i] not in ids[:i])  # tokens before the end of the answer
    if name == TURN_END:
        gguf_models.write(name, file, "Q8_0", ids[whole])
    flags = ("--model", str(file), "--dtype", "float32", "--max-total-tokens", "512")
    flags += FLAGS.get(name, ())
    flags += ("--log-level", "info") if name in IN_ONE_CALL else ()
    with ForkedServer(tmp_path / "log", *flags) as server:
        for speculates in (True, False):
            body = {
                "model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 3,
                "ignore_eos": True, "speculation": {"enabled": speculates},
            }  # fmt: skip
            logprobs = server.post("completions", body)["choices"][0]["logprobs"]["token_logprobs"]
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), atol=2e-4, rtol=1e-4)
            if name == TURN_END:
                ended = server.post("completions", body | {"ignore_eos": False})
                assert ended["choices"][0]["finish_reason"] == "stop"
                assert ended["usage"]["completion_tokens"] == whole + 1
        if name in IN_ONE_CALL:
            assert f"{gguf_models.LAYERS} layers run in one call" in (tmp_path / "log").read_text()
