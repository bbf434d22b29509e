"""A target without hidden states in SGLang is served with a diffusion drafter, which needs none."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from asking import MODEL, accepted_tokens, complete_all, tokens
from metrics_page import metric
from running import ForkedServer, Server
from transformers import Qwen2Config, Qwen2ForCausalLM

from outrider.drafters.block.checkpoint import save_compact, target_identity
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.diffusion.model import DiffusionModel
from outrider.server.model import target

GAMMA = 7
LOUD = range(300, 308)
"""The target's only tokens, which the random drafter knows, so that it is right by chance."""


@pytest.fixture(scope="module")
def silent_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    if not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive starts a server for it")
    folder = tmp_path_factory.mktemp("silent")
    torch.manual_seed(0)
    write_drafter(write_target(folder / "target"), folder / "deer")
    flags = ("--model", str(folder / "target"), "--served-model-name", MODEL, "--dtype", "float32")
    flags += ("--drafter", "deer", "--drafter-path", str(folder / "deer"), "--no-lookup", "--max-total-tokens", "2048")
    with ForkedServer(folder / "log", *flags) as started:
        yield started


def write_target(folder: Path) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights and the embedded model's tokenizer."""
    theirs = Path(target.plain_folder(None))
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        for p in model.model.layers.parameters():
            torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)  # makes answers depend on the context
        model.lm_head.weight[list(LOUD)] *= 10
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(theirs / name, folder)
    return model


def write_drafter(model: Qwen2ForCausalLM, folder: Path) -> None:
    shape = model.config
    config = BlockConfig(
        kind="diffusion", gamma=GAMMA, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32,
        num_target_layers=shape.num_hidden_layers, target_layers=(), mask_token_id=0, rope_theta=1e4,
        max_positions=shape.max_position_embeddings, confidence_head=True, confidence_with_markov=False, qk_norm=False,
        draft_vocab_size=len(LOUD), target=target_identity(shape, model.get_input_embeddings().weight),
    )  # fmt: skip
    drafter = DiffusionModel(config, torch.tensor(LOUD))
    for p in drafter.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    save_compact(drafter, folder)


def test_answers_equal_those_without_speculation(silent_server: Server, prompts: list[str]) -> None:
    body = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
    plain = [tokens(a) for a in complete_all(silent_server, prompts[:16], 8, speculate=False, **body)]
    drafted = [tokens(a) for a in complete_all(silent_server, prompts[:16], 8, speculate=True, **body)]
    assert accepted_tokens(silent_server) > 50
    assert metric(silent_server.url, "outrider_verified_position_total", source="model") > 500
    assert len({tuple(answer) for answer in plain}) > 8
    assert drafted == plain
