"""Settings of a block-diffusion model."""

from typing import Any

import pytest
from refusals import refuses

from outrider.server.model.target import Model
from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.diffusion.target import DiffusionTarget
from outrider.server.settings.model_kinds import with_diffusion
from outrider.server.settings.settings import Settings

SDAR = {"architectures": ["SDARForCausalLM"], "vocab_size": 151936, "block_size": 8}
LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100}


def found(config: dict[str, Any], **given: Any) -> Settings:
    return with_diffusion(Settings(device="cpu", **given), Model("/models/it", "it", config, None))


def test_it_is_recognised_and_passed_to_the_plugin() -> None:
    settings = found(SDAR, unmasking="static", unmasking_tokens=2)
    assert settings.diffusion == DiffusionTarget(block_size=8, mask_token_id=151669)
    assert settings.drafter == "off"
    told: dict[str, str] = {}
    settings.plugin_config.to_env(told)
    assert PluginConfig.from_env(told) == settings.plugin_config
    assert PluginConfig.from_env(told).diffusion == settings.diffusion


def test_other_models_are_left_alone() -> None:
    assert found(LLAMA) == Settings(device="cpu")


@pytest.mark.parametrize(
    ("config", "given", "says"),
    [
        (SDAR, {"drafter": "ngram"}, "--drafter ngram is for models that write from left to right; it is a block-diff"),
        (SDAR, {"gamma": 5}, "--gamma is for drafters, and it is a block-diffusion model"),
        (SDAR, {"drafter_path": "x"}, "--drafter-path is for drafters"),
        (SDAR, {"planner": "threshold"}, "--planner threshold is for drafters, and it is a block-diffusion model"),
        (SDAR, {"unmasking": "static", "unmasking_tokens": 9}, "at most the block's 8 tokens, not 9"),
        (SDAR | {"mask_token_id": -1}, {}, "in its config.json, mask_token_id is a token below"),
        (LLAMA, {"unmasking": "static"}, "--unmasking is for block-diffusion models, and it is none"),
        (LLAMA, {"block_size": 4}, "--block-size is for block-diffusion models"),
        (SDAR, {"sglang_flags": ("--tp-size", "2")}, "--tp-size does not spread"),
    ],
)
def test_incompatible_settings_are_refused(config: dict[str, Any], given: dict[str, Any], says: str) -> None:
    refuses(says, found, config, **given)
