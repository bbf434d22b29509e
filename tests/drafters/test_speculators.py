"""DSpark and DFlash folders of vLLM's speculators hold the same drafters as our own layout."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_drafters import CONFIGS, make_model

from outrider.drafters import networks
from outrider.drafters.block import checkpoint
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.model import BlockModel
from outrider.drafters.config_file import CheckpointError


def config_json(config: BlockConfig, **changes: Any) -> dict[str, Any]:
    """`config.json` of a drafter of this shape; None removes a field."""
    dspark = config.kind == "dspark"
    heads = {
        "markov_rank": config.markov_rank, "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }  # fmt: skip
    made = {
        "architectures": ["DSparkSpeculator" if dspark else "DFlashSpeculator"],
        "speculators_model_type": config.kind, "speculators_version": "0.6.0", "dtype": "bfloat16",
        "block_size": config.queries, "draft_vocab_size": config.logit_size, "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layers],
        "mask_token_id": config.mask_token_id, "sliding_window_non_causal": False,
        "sample_from_anchor": dspark and config.sample_from_anchor, **(heads if dspark else {}),
        "speculators_config": {
            "algorithm": config.kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.gamma}],
            "verifier": {"name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "qwen3", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim, "hidden_act": "silu", "attention_bias": False, "sliding_window": None,
            "max_position_embeddings": config.max_positions, "rms_norm_eps": config.rms_norm_eps,
            "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
            "layer_types": ["full_attention"] * config.num_layers, "tie_word_embeddings": False,
        },
    }  # fmt: skip
    return {key: value for key, value in (made | changes).items() if value is not None}


def save(model: BlockModel, folder: Path, order: torch.Tensor | None = None, **changes: Any) -> Path:
    """Write a model in that layout; order: of the draft tokens, ascending by default."""
    config, tensors = model.config, checkpoint.to_plain(model)
    tensors["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size)
    tensors["lm_head.weight"] = torch.randn(config.logit_size, config.hidden_size)
    if config.draft_vocab_size:
        vocab = model.vocab.cpu() if order is None else model.vocab.cpu()[order]
        tensors["d2t"] = vocab - torch.arange(len(vocab))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, vocab, True)
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][vocab].clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config, **changes)))
    return folder


def same(found: BlockModel, model: BlockModel) -> None:
    assert found.config == dataclasses.replace(model.config, num_target_layers=0)
    expected = model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, value in found.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_folder_holds_the_drafter_that_was_written(config: BlockConfig, tmp_path: Path) -> None:
    model = make_model(config)
    folder = save(model, tmp_path / "drafter")
    assert networks.read_config(folder).kind == config.kind
    same(checkpoint.load(folder, dtype=torch.float32), model)
    networks.check(folder, {"vocab_size": config.vocab_size, "num_hidden_layers": 6, "hidden_size": config.hidden_size})
    weights, state = networks.memory(folder, torch.float32)
    ours = sum(p.numel() for p in model.parameters()) * 4
    assert ours <= weights < 1.5 * ours + 2**20
    assert state > 0


def test_draft_tokens_in_another_order(tmp_path: Path) -> None:
    model = make_model(CONFIGS["truncated"])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    same(checkpoint.load(save(model, tmp_path, order), dtype=torch.float32), model)


@pytest.mark.parametrize("name", ["dspark", "behind", "dflash"])
def test_versions_without_the_first_rows_meaning_state_the_number_of_tokens(name: str) -> None:
    config = CONFIGS[name]
    read = BlockConfig.from_json(config_json(config, sample_from_anchor=None))
    assert read == dataclasses.replace(config, num_target_layers=0)
    assert read.queries == config_json(config)["block_size"]


def test_sliding_layers_are_causal() -> None:
    config = dataclasses.replace(CONFIGS["dflash"], windows=(7, -1), num_target_layers=0)
    slides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    shape = config_json(config)["transformer_layer_config"]
    assert BlockConfig.from_json(config_json(config, transformer_layer_config=shape | slides)) == config
    assert BlockConfig.from_json(config_json(config, **slides)) == config  # some have them outside the section
    for said in (True, None):
        with pytest.raises(CheckpointError, match="sliding_window_non_causal: false"):
            BlockConfig.from_json(config_json(config, **slides, sliding_window_non_causal=said))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dspark", {"speculators_model_type": "peagle"}, "'peagle' is unknown; expected one of dspark, dflash, eagle3"),
        ("dspark", {"selector_rank": 4, "conv_kernel_size": 3}, "does not know: conv_kernel_size, selector_rank"),
        ("dspark", {"quantization_config": {"bits": 4}}, "does not know: quantization_config"),
        ("dspark", {"mask_token_id": None}, "no 'mask_token_id'"),
        ("dspark", {"aux_hidden_state_layer_ids": None}, "no 'aux_hidden_state_layer_ids'"),
        ("dspark", {"aux_hidden_state_layer_ids": [0, 3]}, "must rise from 0"),
        ("dspark", {"transformer_layer_config": None}, "no 'transformer_layer_config'"),
        ("dspark", {"target_hidden_size": 64}, "target_hidden_size 64 with hidden_size 32"),
        ("dspark", {"markov_rank": 0}, "markov_rank of at least 1"),
        ("dspark", {"sample_from_anchor": None, "speculators_config": {}}, "which token the first row of a block"),
        ("dspark", {"sample_from_anchor": None, "block_size": 9}, "which token the first row of a block"),
        ("dflash", {"sample_from_anchor": True}, "DFlash drafter uses sample_from_anchor"),
    ],
)
def test_unreadable_folders_are_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        BlockConfig.from_json(config_json(CONFIGS[name], **changes))


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("attention_bias", True), ("hidden_size", None)])
def test_layers_that_are_not_built_are_refused_by_name(key: str, value: Any) -> None:
    made = config_json(CONFIGS["dspark"])
    made["transformer_layer_config"][key] = value
    with pytest.raises(CheckpointError, match=key):
        BlockConfig.from_json(made)


def test_invalid_draft_tokens_are_refused(tmp_path: Path) -> None:
    model = make_model(CONFIGS["truncated"])
    save(model, tmp_path)
    tensors = checkpoint.read_tensors(tmp_path)
    save_file(tensors | {"d2t": tensors["d2t"] * 0 + 90}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t must name 40 different tokens of the target's 96"):
        checkpoint.load(tmp_path)
    tensors.pop("d2t")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the tokens are not stored"):
        checkpoint.load(tmp_path)
