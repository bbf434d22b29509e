"""The embedded model as served, compared with llama.cpp."""

from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import torch
from running import ForkedServer, Server
from transformers import AutoTokenizer

from outrider.server.model import bundled_model, target

PROMPTS = [
    "The capital of France is", "def add(a, b):\n    return a", "Once upon a time, there was a little",
    "Water boils at 100 degrees", "1, 2, 3, 4, 5,", "Dear Mr. Okafor, the kitchen tap has been dripping for",
    "The opposite of hot is", "import numpy as np\n\nx = np.",
]  # fmt: skip
ASKED = 10
"""Tokens with compared log-probabilities after each prompt: llama.cpp's likeliest."""
CLOSE = 0.25
"""Mean difference; measured 0.14, with float and rounded activations, which llama.cpp rounds in other blocks."""
NO_WORSE = 1.25
"""Rounded activations relative to float ones; measured 0.96."""


def served(server: Server, prompts: list[list[int]], tokenizer: Any, likeliest: list[torch.Tensor]) -> torch.Tensor:
    """The server's log-probabilities [prompts, ASKED]; NaN outside its 20 likeliest."""
    rows = []
    for ids, tokens in zip(prompts, likeliest, strict=True):
        body = {"model": bundled_model.NAME, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 20}
        (likely,) = server.post("completions", body)["choices"][0]["logprobs"]["top_logprobs"]
        rows.append([likely.get(tokenizer.decode([token]), float("nan")) for token in tokens.tolist()])
    return torch.tensor(rows)


@pytest.mark.server
def test_float_and_rounded_activations(server: Server, tmp_path: Path) -> None:
    model = target.find(None)
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    with llama_cpp.opened(bundled_model.find_gguf(), tmp_path / "log") as reader:
        top = [reader.logprobs(ids, model.config["vocab_size"]).topk(ASKED) for ids in prompts]
    theirs, likeliest = torch.stack([row.values for row in top]), [row.indices for row in top]
    exact = (served(server, prompts, tokenizer, likeliest) - theirs).abs()
    with ForkedServer(tmp_path / "served", "--activations", "int8", "--max-total-tokens", "1024") as rounding:
        rounded = (served(rounding, prompts, tokenizer, likeliest) - theirs).abs()
    assert exact.nanmean() < CLOSE
    assert rounded.nanmean() < NO_WORSE * exact.nanmean()
    assert not exact.isnan().any()
