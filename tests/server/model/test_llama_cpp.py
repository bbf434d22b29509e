"""llama.cpp's probabilities after the same tokens, from the same GGUF files, equal ours.

transformers runs our folder; test_gguf_served.py compares the server with that.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_models
import llama_cpp
import pytest
import torch
from gguf_models import CONTEXT, MODELS, PROMPT, WINDOW, logprobs
from transformers import AutoModelForCausalLM

from outrider.server.model import gguf_architectures, target
from outrider.server.model.gguf_architectures import SUPPORTED, Architecture

pytestmark = pytest.mark.slow

CLOSE = 1e-4
"""Between log-probabilities of float32 weights; measured up to 6e-6."""
LOOKED_UP = 5e-3
"""Where llama.cpp takes GELU from a table in half precision; measured 1.3e-3."""
ROUNDED = 0.08
"""Mean difference where only llama.cpp rounds activations to 8 bits; measured up to 0.034."""
SHORT = {"phi3": WINDOW}
"""Tokens of prompts: llama.cpp ignores the window of Phi-3."""
CONTEXTS = {"phi3-partial": CONTEXT // 2}
"""Tokens that llama.cpp has room for; beyond the original context it takes the other factors."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def theirs(name: str, file: Path) -> torch.Tensor:
    with llama_cpp.opened(file, file.with_suffix(".log"), CONTEXTS.get(name, CONTEXT)) as reader:
        return reader.logprobs(prompt(name), len(gguf_models.tiny_gguf.tokens()))


def ours(name: str, file: Path) -> torch.Tensor:
    folder = target.plain_folder(str(file))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return logprobs(model, prompt(name))[-1]


def bound(name: str) -> float:
    return LOOKED_UP if MODELS[name].architecture == "gemma3" else CLOSE


def prompt(name: str) -> list[int]:
    return PROMPT[: SHORT.get(name)]


@pytest.mark.parametrize("name", MODELS)
def test_float_weights(tmp_path: Path, name: str) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_models.write(name, file)
    torch.testing.assert_close(ours(name, file), theirs(name, file), atol=bound(name), rtol=0)


@pytest.mark.parametrize("name", ["llama3", "qwen3moe", "gemma3"])
def test_weights_in_blocks(tmp_path: Path, name: str) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_models.write(name, file, "Q8_0")
    assert (ours(name, file) - theirs(name, file)).abs().mean() < ROUNDED


def _rope(change: dict[str, Any]) -> Callable[[Architecture], Architecture]:
    return lambda row: replace(
        row,
        config=lambda file, config: row.config(file, config) | {"rope_parameters": {"rope_type": "default"} | change},
    )


FAULTS: dict[str, tuple[str, Callable[[Architecture], Architecture]]] = {
    "rows of queries and keys in the file's order": ("llama", lambda row: replace(row, permuted=False)),
    "rows of queries and keys in another order": ("qwen3", lambda row: replace(row, permuted=True)),
    "Llama 3's scaling is ignored": ("llama3", _rope({"rope_theta": 5000.0})),
    "another base of positions": ("qwen2", _rope({"rope_theta": 6000.0})),
    "norms as the file has them": ("gemma3", lambda row: replace(row, norms_from_one=False)),
    "norms of queries and keys are exchanged": (
        "qwen3",
        lambda row: replace(row, layer=dict(row.layer) | {
            "attn_q_norm.weight": "self_attn.k_norm.weight", "attn_k_norm.weight": "self_attn.q_norm.weight",
        }),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_detected(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = FAULTS[fault]
    file = tmp_path / "tiny.gguf"
    gguf_models.write(name, file)
    architecture = MODELS[name].architecture
    monkeypatch.setitem(gguf_architectures.SUPPORTED, architecture, change(SUPPORTED[architecture]))
    assert (ours(name, file) - theirs(name, file)).abs().max() > 20 * bound(name)
