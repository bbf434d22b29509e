"""Configs and tensors of public DSpark and DFlash checkpoints, with random weights."""

import dataclasses
from typing import Any

import pytest
import torch
from margins import assert_near
from tiny_drafters import TERMS, TINY, draft_after, make_model

from outrider.drafters.block.checkpoint import load_plain
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import BlockModel
from outrider.drafters.config_file import CheckpointError


def dspark(hidden: int, inner: int, heads: int, target_layers: int, layer_ids: list[int]) -> dict[str, Any]:
    """config.json of deepseek-ai/dspark_qwen3_…_block7."""
    return {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 7,
        "confidence_head_with_markov": True, "enable_confidence_head": True, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "layer_types": ["full_attention"] * 5,
        "markov_head_type": "vanilla", "markov_rank": 256, "mask_token_id": 151669, "max_position_embeddings": 40960,
        "num_attention_heads": heads, "num_hidden_layers": 5, "num_key_value_heads": 8,
        "num_target_layers": target_layers, "rms_norm_eps": 1e-6, "sliding_window": None,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "target_layer_ids": layer_ids,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip


def dflash(layers: int, hidden: int, inner: int, heads: int, vocab: int, **others: Any) -> dict[str, Any]:
    """config.json of z-lab/…-DFlash."""
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "vocab_size": vocab, "dtype": "bfloat16",
    } | others  # fmt: skip


PUBLIC = {
    "dspark_qwen3_4b_block7": dspark(2560, 9728, 32, 36, [1, 9, 17, 25, 33]),
    "dspark_qwen3_8b_block7": dspark(4096, 12288, 32, 36, [1, 9, 17, 25, 33]),
    "dspark_qwen3_14b_block7": dspark(5120, 17408, 40, 40, [1, 10, 19, 28, 37]),
    "Qwen3-4B-DFlash-b16": dflash(
        5, 2560, 9728, 32, 151936, block_size=16, num_target_layers=36, rope_theta=1000000, rope_scaling=None,
        layer_types=["full_attention"] * 5, sliding_window=None, max_position_embeddings=40960,
        dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    ),
    "Qwen3.5-122B-A10B-DFlash": dflash(
        6, 3072, 9216, 32, 248320, max_position_embeddings=262144, use_sliding_window=True, sliding_window=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000}, tie_word_embeddings=False,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        dflash_config={"block_size": 16, "mask_token_id": 248077, "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45]},
    ),
}  # fmt: skip
"""The kinds of the last one's layers are made up."""


def tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * 128, config["num_key_value_heads"] * 128
    ids = config.get("target_layer_ids") or config["dflash_config"]["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(ids) * size), "hidden_norm.weight": (size,), "norm.weight": (size,)
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes |= {f"{attention}.{p}_proj.weight": (q if p == "q" else kv, size) for p in "qkv"}
        shapes |= {f"{attention}.o_proj.weight": (size, q), f"{mlp}.down_proj.weight": (size, inner)}
        shapes |= {f"{attention}.{p}_norm.weight": (128,) for p in "qk"}
        shapes |= {f"{mlp}.{p}_proj.weight": (inner, size) for p in ("gate", "up")}
        shapes |= {f"layers.{i}.{p}_layernorm.weight": (size,) for p in ("input", "post_attention")}
    if rank := config.get("markov_rank"):
        shapes |= {f"markov_head.markov_w{i}.weight": (config["vocab_size"], rank) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, size + rank), "confidence_head.proj.bias": (1,)}
        shapes |= {f"{name}.weight": (config["vocab_size"], size) for name in ("embed_tokens", "lm_head")}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_tensor_finds_its_place_in_its_exact_shape(name: str) -> None:
    config = BlockConfig.from_json(PUBLIC[name])
    with torch.device("meta"):
        model = BlockModel(config)
    stored = tensors(PUBLIC[name])
    load_plain(model, stored)
    ours = sum(p.numel() for p in model.parameters())
    shared = sum(x.numel() for n, x in stored.items() if n.startswith(("embed_tokens", "lm_head")))
    assert ours == sum(x.numel() for x in stored.values()) - shared
    stored.pop("fc.weight")
    with pytest.raises(CheckpointError, match=r"lacks fc\.weight"):
        load_plain(model, stored)


def confidence(window: int, changed: int = 0, gamma: int = 4) -> torch.Tensor:
    """Confidences [gamma] after 40 tokens, of which the first `changed` have other states."""
    model = make_model(dataclasses.replace(TINY, windows=(window, window), target_layers=(1,)))
    rows, states, others = torch.randn(3, 96, 32, generator=torch.Generator().manual_seed(1))
    drafter, place = BlockDrafter(model, embedding=rows, head=rows, gamma=gamma), torch.arange(40)
    assert drafter.compiled is None
    return draft_after(drafter, place, torch.where(place[:, None] < changed, others[:40], states[:40])).confidence[0]


def test_a_window_hides_earlier_tokens() -> None:
    """Position 40 sees 36 … 40 through a window of five, so no row sees 35."""
    assert torch.equal(confidence(4), confidence(4, changed=36))
    assert not torch.equal(confidence(4), confidence(4, changed=37))


def test_a_window_hides_later_tokens() -> None:
    """With windows, a block's rows are causal."""
    assert_near(confidence(30, gamma=1)[0], confidence(30)[0], TERMS)


def test_unknown_layers_and_architectures_are_refused() -> None:
    public = PUBLIC["Qwen3.5-122B-A10B-DFlash"]
    for change, message in (
        ({"layer_types": ["linear_attention"] * 6}, "expected full_attention or sliding_attention"),
        ({"layer_types": ["full_attention"]}, "for each of 6 layers"),
        ({"sliding_window": None}, "sliding_window of at least 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            BlockConfig.from_json(public | change)


def test_windows_survive_the_config() -> None:
    config = BlockConfig.from_json(PUBLIC["Qwen3.5-122B-A10B-DFlash"])
    assert config.windows == (4095,) * 5 + (-1,)
    assert config.num_target_layers == 0
    assert BlockConfig.from_json(config.to_json()) == config
