"""Text weights from whole models, and caches for layers of several shapes."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from outrider.server.plugin.cpu import layer_shapes, text_models

LAYER = "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("begins", ["model.language_model.", "language_model.model.", "model."])
def test_a_texts_weights_get_the_names_of_a_text_model(begins: str) -> None:
    """Folders come from Transformers 5, older versions, and Qwen2.5-VL."""
    head = "language_model.lm_head.weight" if begins.startswith("language_model") else "lm_head.weight"
    named = [f"{begins}{LAYER}", f"{begins}embed_tokens.weight", f"{begins}norm.weight", head]
    others = ["model.visual.blocks.0.norm1.weight", "visual.merger.mlp.0.weight", "vision_tower.layers.0.weight"]
    others += ["model.vision_tower.layers.0.weight", "model.multi_modal_projector.norm.weight", "mtp.layers.0.weight"]
    weights = text_models.weights_of_the_text((name, torch.zeros(1)) for name in [*named, *others])
    expected = [f"model.{LAYER}", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert [name for name, _ in weights] == expected


@pytest.mark.parametrize("turned", [False, True])
def test_experts_side_by_side_become_each_experts(turned: bool) -> None:
    both, down = torch.randn(3, 4, 10), torch.randn(3, 5, 4)  # [experts, in, out]
    whole = {"model.layers.1.mlp.experts.gate_up_proj": both, "model.layers.1.mlp.experts.down_proj": down}
    stored = {name: weight.transpose(1, 2) if turned else weight for name, weight in whole.items()}
    experts = dict(text_models.each_expert([*stored.items(), (LAYER, both[0])], 4))
    assert len(experts) == 3 * 3 + 1
    expert = "model.layers.1.mlp.experts.2"
    x = torch.randn(7, 4)
    gate, up = (x @ both[2]).chunk(2, -1)
    torch.testing.assert_close(x @ experts[f"{expert}.gate_proj.weight"].t(), gate)
    torch.testing.assert_close(x @ experts[f"{expert}.up_proj.weight"].t(), up)
    torch.testing.assert_close(experts[f"{expert}.down_proj.weight"].t(), down[2])


def test_each_layers_cache_has_its_shape() -> None:
    pool = SimpleNamespace(start_layer=0)
    pool.k_buffer, pool.v_buffer = ([torch.ones(6, 2, 32) for _ in range(2)] for _ in range(2))
    layers = [RadixAttention(4, 32, 1.0, 2, layer_id=0), RadixAttention(4, 16, 1.0, 1, layer_id=1, v_head_dim=8)]
    first = pool.k_buffer[0]
    layer_shapes.fit(pool, torch.nn.ModuleList(layers))
    assert pool.k_buffer[0] is first
    assert [tuple(buffers[1].shape) for buffers in (pool.k_buffer, pool.v_buffer)] == [(6, 1, 16), (6, 1, 8)]
