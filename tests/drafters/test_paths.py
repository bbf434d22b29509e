"""DFlash 2 and LiLiCorr: drafts follow the published tensors, on paths drawn from their q."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from margins import assert_near
from path_reference import Reference
from scenes import LENGTHS, Scene
from tiny_drafters import DFLASH2, LILICORR, PATHS, TERMS, WIDE_PATHS, batch, make_model

from outrider.drafters.block import checkpoint
from outrider.drafters.block.checkpoint import save_plain
from outrider.drafters.block.choosing import CodebookChoosing, Convolution
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.config_file import CheckpointError

QWEN38: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"], "attention_bias": False, "is_causal": False, "head_dim": 128,
    "dflash_config": {
        "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248070, "selector_rank": 256,
        "selector_top_k": 16, "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408, "layer_types": ["sliding_attention"] * 5,
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}, "sliding_window": 2048,
    "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": 248320,
}  # fmt: skip
"""config.json of z-lab/Qwen3.8-27B-DFlash2, the fields that a loader reads."""


@pytest.fixture(params=sorted(PATHS | WIDE_PATHS))
def config(request: pytest.FixtureRequest) -> BlockConfig:
    return (PATHS | WIDE_PATHS)[request.param]


def reference(config: BlockConfig, drafter: Any) -> Reference:
    tensors = checkpoint.to_plain(drafter.model)
    return Reference(config.to_json(), tensors, drafter.embedding, drafter.head)


def test_drafts_follow_the_published_tensors(config: BlockConfig) -> None:
    scene = Scene.of_block(config)
    drafter, table = scene.observed()
    asking = batch(table, [0, 1, 2], list(LENGTHS))
    greedy = drafter.propose(asking)
    sampled = drafter.propose(dataclasses.replace(asking, temperatures=torch.full((3,), 0.7)))
    for row, length in enumerate(LENGTHS):
        lattice = reference(config, drafter).lattice(3 + row, scene.states(row)[:length], config.gamma)
        best, drawn = 0, 0
        for k, (ids, scores) in enumerate(zip(*lattice, strict=True)):
            best = int(scores[best].argmax())
            assert int(greedy.tokens[row, k]) == ids[best]
            wanted = torch.zeros(config.vocab_size)
            wanted[ids] = (scores[drawn] / 0.7).softmax(-1)
            assert_near(sampled.probs[row, k], wanted, TERMS)
            drawn = ids.index(int(sampled.tokens[row, k]))


def test_a_published_config() -> None:
    config = BlockConfig.from_json(QWEN38)
    assert (config.kind, config.gamma, config.windows, config.open_windows) == ("dflash2", 7, (2047,) * 5, True)
    assert (config.choosing, config.convolution) == (CodebookChoosing(16, 256), Convolution(2, 16))
    assert BlockConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (DFLASH2, {"selector_rank": None}, "no 'selector_rank'"),
        (DFLASH2, {"selector_top_k": 0}, "selector_top_k is a positive number, not 0"),
        (DFLASH2, {"selector_top_k": 97}, "the whole vocabulary"),
        (DFLASH2, {"conv_group_size": 0}, "conv_group_size is a positive number, not 0"),
        (DFLASH2, {"conv_group_size": 5}, "conv_group_size 5 does not divide 32"),
        (DFLASH2, {"input_embedding_scale": 2.0}, "uses input_embedding_scale"),
        (DFLASH2, {"attention_sink_bias": True, "beam": 3}, "uses attention_sink_bias, beam, which"),
        (DFLASH2, {"projector_type": "domino"}, "uses projector_type"),
        (LILICORR, {"lilicorr_logit_scale": None}, "no 'lilicorr_logit_scale'"),
        (LILICORR, {"lilicorr_enabled": False}, "uses lilicorr_enabled False"),
        (LILICORR, {"lilicorr_num_heads": 5}, "lilicorr_num_heads 5 does not divide"),
        (LILICORR, {"lilicorr_depth": 2}, "uses lilicorr_depth"),
        (LILICORR, {"output_multiplier": 2.0}, "uses output_multiplier"),
    ],
)
def test_wrong_fields_are_refused_by_name(base: BlockConfig, change: dict[str, Any], message: str) -> None:
    made = base.to_json()
    made["dflash_config"] |= change
    with pytest.raises(CheckpointError, match=message):
        BlockConfig.from_json(made)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_plain(make_model(LILICORR), tmp_path)
    made = LILICORR.to_json()
    made["dflash_config"] |= {"conv_kernel_size": 0, "conv_group_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(made))
    with pytest.raises(CheckpointError, match=r"does not know: layers\.0\.attention_conv\.base_kernel"):
        checkpoint.load(tmp_path)
    made = dataclasses.replace(LILICORR, choosing=dataclasses.replace(LILICORR.choosing, layers=3)).to_json()
    (tmp_path / "config.json").write_text(json.dumps(made))
    with pytest.raises(CheckpointError, match=r"lacks lilicorr\.layers\.2"):
        checkpoint.load(tmp_path)
