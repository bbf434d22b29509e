"""SGLang's models as we change them: weights, windows, rotary tables, caches, and the rows of the last layer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from outrider.server.plugin.cpu import layer_shapes, text_models
from outrider.server.plugin.cpu.fused_model import _read_rows
from outrider.server.plugin.loading import more_models, stated

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


WIDTH, ORIGINAL, LONGEST = 32, 16, 64
FACTORS = {"short": [1.0 + i / 10 for i in range(WIDTH // 2)], "long": [2.0 + i for i in range(WIDTH // 2)]}


@pytest.mark.parametrize(("served", "chosen"), [(None, "long"), (LONGEST, "long"), (17, "long"), (16, "short")])
def test_the_context_chooses_long_ropes_factors(
    served: int | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with SGLang's own table, for every position."""
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(context_length=served))
    theirs = Phi3LongRoPEScaledRotaryEmbedding(
        WIDTH, WIDTH, LONGEST, ORIGINAL, 5000, True, torch.float32, FACTORS["short"], FACTORS["long"]
    )
    ours: Any = more_models._one_table(theirs, SimpleNamespace(rope_parameters={}))
    assert type(ours).forward_native is RotaryEmbedding.forward_native
    assert ours.cos_sin_cache.shape == (LONGEST, WIDTH)
    expected = getattr(theirs, f"{chosen}_cos_sin_cache")
    torch.testing.assert_close(ours.cos_sin_cache[: len(expected)], expected)
    stated: Any = more_models._one_table(theirs, SimpleNamespace(rope_parameters={"attention_factor": 3.0}))
    torch.testing.assert_close(stated.cos_sin_cache, ours.cos_sin_cache * 3 / theirs.long_mscale)


LAST, ALL = [2, 3, 7], None
"""Rows of three requests with 3, 1 and 4 tokens."""


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (LAST, {}),
        (LAST, {"mode": ForwardMode.MIXED}),
        (LAST, {"hidden": CaptureHiddenMode.LAST}),
        (LAST, {"hidden": CaptureHiddenMode.FULL, "captured": True}),
        (ALL, {"hidden": CaptureHiddenMode.FULL}),
        (ALL, {"logprobs": True}),
        (ALL, {"mode": ForwardMode.TARGET_VERIFY}),
        (ALL, {"mode": ForwardMode.DECODE}),
        (ALL, {"mode": ForwardMode.DLLM_EXTEND}),
        (ALL, {"causal": False}),
        (ALL, {"lens": [3, 0, 5]}),
    ],
    ids=str,
)
def test_rows_that_are_read(expected, changes):
    given = {"mode": ForwardMode.EXTEND, "hidden": CaptureHiddenMode.NULL, "captured": False, "logprobs": False}
    given |= {"causal": True, "lens": [3, 1, 4]} | changes
    indptr = torch.tensor([0, *given["lens"]]).cumsum(0).int()
    backend = SimpleNamespace(causal=given["causal"], batch=SimpleNamespace(qo_indptr=indptr))
    forward_batch = SimpleNamespace(
        forward_mode=given["mode"], capture_hidden_mode=given["hidden"], return_logprob=given["logprobs"]
    )
    rows = _read_rows(forward_batch, backend, given["captured"])
    assert (rows if rows is None else rows.tolist()) == expected
