"""Block-diffusion models are known by their config.json."""

from typing import Any

import pytest

from outrider.server.plugin.diffusion.target import DiffusionConfigError, DiffusionTarget, recognise

QWEN = {"vocab_size": 151936}
CONVERTED = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "block_size": 4, "mask_token_id": 9}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["SDARForCausalLM"]} | QWEN, DiffusionTarget(block_size=4, mask_token_id=151669)),
        (
            {"architectures": ["SDARForCausalLM"], "block_size": 32, "mask_token_id": 7} | QWEN,
            DiffusionTarget(block_size=32, mask_token_id=7),
        ),
        (
            {"architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 16} | QWEN,
            DiffusionTarget(block_size=16, mask_token_id=151665, shift=True),
        ),
        ({"architectures": ["A2DQwen3LMHeadModel"]} | QWEN, DiffusionTarget(block_size=4, mask_token_id=151669)),
        (CONVERTED, DiffusionTarget(block_size=4, mask_token_id=9)),
        (
            CONVERTED | {"shift": True, "context_mask": "causal"},
            DiffusionTarget(block_size=4, mask_token_id=9, shift=True, causal_context=True),
        ),
        ({"architectures": ["LlamaForCausalLM"], "block_size": 4} | QWEN, None),
        ({"architectures": ["MistralForCausalLM"], "block_size": 4, "mask_token_id": 9}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_known_by_their_config(config: dict[str, Any], expected: DiffusionTarget | None) -> None:
    assert recognise(config) == expected


def test_a_requested_block_size_wins() -> None:
    settings = recognise({"architectures": ["SDARForCausalLM"], "block_size": 4} | QWEN, block_size=32)
    assert settings is not None
    assert settings.block_size == 32


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"block_size": 1}, "block_size is a number from 2 to 256, not 1"),
        ({"block_size": "4"}, "not '4'"),
        ({"mask_token_id": 100}, "below vocab_size (100), not 100"),
        ({"context_mask": "full"}, "one of block, causal, not 'full'"),
    ],
)
def test_contradictory_settings_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(DiffusionConfigError) as error:
        recognise(CONVERTED | wrong)
    assert says in str(error.value)
