"""DSpark drafters for Gemma 4 targets, compared with transformers' modules."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from margins import assert_near
from tiny_drafters import TERMS, TINY, draft_after
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.models.gemma4 import modeling_gemma4 as theirs
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.drafters.block.checkpoint import load, load_plain, save_compact, save_plain, to_plain
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.layers import Rotary
from outrider.drafters.block.model import BlockModel
from outrider.drafters.config_file import CheckpointError

GEMMA_12B: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "attention_bias": False,
    "attention_k_eq_v": True, "block_size": 7, "confidence_head_with_markov": True, "enable_confidence_head": True,
    "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3840, "hidden_size_per_layer_input": 0,
    "intermediate_size": 15360, "layer_types": ["full_attention"] * 5, "markov_head_type": "vanilla",
    "markov_rank": 256, "mask_token_id": 4, "max_position_embeddings": 262144, "num_attention_heads": 16,
    "num_global_key_value_heads": 1, "num_hidden_layers": 5, "num_key_value_heads": 8, "num_kv_shared_layers": 0,
    "num_target_layers": 48, "rms_norm_eps": 1e-6, "sliding_window": 1024, "target_layer_ids": [5, 17, 29, 41, 46],
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "rope_theta": None, "rope_type": "default", "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "tie_word_embeddings": False, "use_double_wide_mlp": False, "vocab_size": 262144,
}  # fmt: skip
"""config.json of deepseek-ai/dspark_gemma4_12b_block7, the fields that a loader reads."""
STORED_BYTES = 6_860_897_028
"""Tensor bytes of its model.safetensors."""
SMALL = GEMMA_12B | {
    "global_head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "markov_rank": 8,
    "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "target_layer_ids": [1, 3], "num_target_layers": 6,
    "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
SEPARATE = SMALL | {"attention_k_eq_v": False, "num_key_value_heads": 2, "final_logit_softcapping": None}
POSITIONS = 12


def made(config: dict[str, Any]) -> BlockModel:
    torch.manual_seed(0)
    model = BlockModel(BlockConfig.from_json(config))
    for value in model.state_dict().values():
        torch.nn.init.normal_(value, mean=float(value.ndim == 1), std=0.2)
    return model.requires_grad_(False)


def test_its_tensors_are_as_many_bytes_as_the_published_file() -> None:
    with torch.device("meta"):
        model = BlockModel(BlockConfig.from_json(GEMMA_12B | {"max_position_embeddings": 8}))
    numbers = sum(value.numel() for value in model.state_dict().values())
    shared = 2 * model.config.vocab_size * model.config.hidden_size
    assert 0 < STORED_BYTES - 2 * (numbers + shared) < 10_000  # the file's header
    stored = {name: value for name, value in to_plain(made(SMALL)).items() if "layers.0.self_attn" in name}
    assert [name.split(".")[3] for name in stored] == ["q_proj", "k_proj", "q_norm", "k_norm", "o_proj"]


@pytest.mark.parametrize("config", [SMALL, SEPARATE], ids=["values are keys", "values of their own"])
def test_a_draft_equals_transformers_modules(config: dict[str, Any]) -> None:
    model, generator = made(config), torch.Generator().manual_seed(1)
    ours = model.config
    rows = torch.randn(96, 64, generator=generator) * 0.3
    states = torch.randn(POSITIONS, 128, generator=generator)
    drafter = BlockDrafter(model, embedding=rows, head=rows)
    assert drafter.compiled is None  # the kernels lack these layers
    draft = draft_after(drafter, torch.arange(POSITIONS), states, temperature=1.0)
    hidden = reference(config, to_plain(model), rows, states)
    logits = hidden @ rows.T
    logits = torch.tanh(logits / ours.logit_cap) * ours.logit_cap if ours.logit_cap else logits
    markov = model.markov_head
    before = torch.cat([torch.tensor([3]), draft.tokens[0, :-1]])
    logits = logits + markov.w1.weight[before] @ markov.w2.weight.T
    assert_near(draft.probs[0], logits.softmax(-1), TERMS)


def reference(
    config: dict[str, Any], stored: dict[str, torch.Tensor], rows: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Hidden states [7, d] of a block of token 3 and masks: Gemma4DSparkModel by transformers' Gemma 4."""
    text = Gemma4TextConfig(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
    dim, heads = config["global_head_dim"], config["num_attention_heads"]
    angles = theirs.Gemma4TextRotaryEmbedding(text)
    positions = torch.arange(POSITIONS + 7)[None]
    cos, sin = angles(rows, positions, layer_type="full_attention")

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = theirs.Gemma4RMSNorm(x.shape[-1], eps=1e-6, with_scale=bool(name))
        if name:
            module.load_state_dict({"weight": stored[f"{name}.weight"]})
        return module(x)

    context = norm("hidden_norm", states @ stored["fc.weight"].T)
    x = rows[[3] + [4] * 6] * 64**0.5
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn", theirs.Gemma4TextMLP(text, 0)
        mlp.load_state_dict(
            {f"{p}.weight": stored[f"layers.{i}.mlp.{p}.weight"] for p in ("gate_proj", "up_proj", "down_proj")}
        )
        inner = norm(f"layers.{i}.input_layernorm", x)
        both = torch.cat([context, inner])
        q = (inner @ stored[f"{attention}.q_proj.weight"].T).view(1, 7, heads, dim)
        k = (both @ stored[f"{attention}.k_proj.weight"].T).view(1, len(both), -1, dim)
        value = stored.get(f"{attention}.v_proj.weight", stored[f"{attention}.k_proj.weight"])
        v = norm("", (both @ value.T).view(1, len(both), -1, dim))
        q = theirs.apply_rotary_pos_emb(norm(f"{attention}.q_norm", q), cos[:, -7:], sin[:, -7:], unsqueeze_dim=2)
        k = theirs.apply_rotary_pos_emb(norm(f"{attention}.k_norm", k), cos, sin, unsqueeze_dim=2)
        attended = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), scale=1.0, enable_gqa=True)
        out = attended.transpose(1, 2).reshape(7, -1) @ stored[f"{attention}.o_proj.weight"].T
        x = x + norm(f"layers.{i}.post_attention_layernorm", out)
        down = mlp(norm(f"layers.{i}.pre_feedforward_layernorm", x))
        x = (x + norm(f"layers.{i}.post_feedforward_layernorm", down)) * stored[f"layers.{i}.layer_scalar"]
    return norm("norm", x)


@pytest.mark.parametrize("save", [save_plain, save_compact])
def test_folders_round_trip(save: Any, tmp_path: Path) -> None:
    model = made(SMALL).bfloat16()
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again.layers[1].layer_scalar, model.layers[1].layer_scalar)
    load_plain(made(SMALL), to_plain(again))


ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_a_scaled_rotary_embedding_equals_transformers(rope: dict[str, Any]) -> None:
    config = BlockConfig.from_json(TINY.to_json() | {"rope_parameters": rope | {"rope_theta": 5e4}})
    assert BlockConfig.from_json(config.to_json()) == config
    other = LlamaConfig(
        head_dim=config.head_dim, hidden_size=32, num_attention_heads=2, max_position_embeddings=config.max_positions,
        rope_parameters=rope | {"rope_theta": 5e4},
    )  # fmt: skip
    positions = torch.arange(config.max_positions)
    cos, sin = LlamaRotaryEmbedding(other)(torch.zeros(1), positions[None])
    rows = Rotary(config).rows(positions)
    half = config.head_dim // 2
    torch.testing.assert_close(rows[0][:, 0], cos[0])
    torch.testing.assert_close(rows[1][:, 0, half:], sin[0, :, half:])
    assert not torch.allclose(cos[0], Rotary(dataclasses.replace(config, rope={})).rows(positions)[0][:, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "lacks original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "is none of default, linear"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotates a part of each head"),
    ],
)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        BlockConfig.from_json(SMALL | change)
