"""SGLang's models follow config.json: windows, and OLMo 3's rotary base."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from outrider.server.plugin.loading import stated

SLIDING, FULL = "sliding_attention", "full_attention"


def windows(**config: Any) -> list[int]:
    """Windows of two layers that SGLang gave 99, and of one without a module."""
    layers = [RadixAttention(1, 16, 1.0, 1, layer_id=i, sliding_window_size=99) for i in range(3)]
    model = torch.nn.ModuleList(layers[:2])
    model.attention_instances = {2: layers[2]}  # type: ignore[assignment]
    stated.set_windows(model, SimpleNamespace(**config))
    return [layer.sliding_window_size for layer in layers]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, [7, 7, 7]),
        ({"model_type": "mistral", "sliding_window": None}, [99, 99, 99]),
        ({"model_type": "other", "sliding_window": 8}, [99, 99, 99]),
        ({"model_type": "other", "sliding_window": 8, "layer_types": [FULL, SLIDING, FULL]}, [-1, 7, -1]),
    ],
)
def test_layers_have_the_window_of_the_configuration(config: dict[str, Any], expected: list[int]) -> None:
    assert windows(**config) == expected


def test_a_model_with_its_own_window_is_left_alone() -> None:
    layer = RadixAttention(1, 16, 1.0, 1, layer_id=0, sliding_window_size=99)
    model, config = torch.nn.ModuleList([layer]), SimpleNamespace(model_type="mistral", sliding_window=8)
    model.get_attention_sliding_window_size = lambda: 99  # type: ignore[assignment]
    assert stated.initialize(lambda _: model, SimpleNamespace(hf_text_config=config)) is model
    assert layer.sliding_window_size == 99


def test_rotary_positions_as_transformers_5_writes_them() -> None:
    parameters: dict[str, Any] = {}
    read = stated.with_rope(lambda self, **fields: parameters.update(fields))
    read(None, rope_parameters={FULL: {"rope_type": "default", "rope_theta": 5.0}}, vocab_size=3)
    assert parameters == {"rope_theta": 5.0, "vocab_size": 3}
    parameters.clear()
    read(None, rope_parameters={FULL: {"rope_type": "yarn", "rope_theta": 5.0, "factor": 8.0}})
    assert parameters == {"rope_theta": 5.0, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
    parameters.clear()
    read(None, rope_theta=7.0, rope_scaling=None)
    assert parameters == {"rope_theta": 7.0, "rope_scaling": None}
