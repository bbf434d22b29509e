"""SGLang's models as we change them: weights, rotary tables, and the rows of the last layer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from outrider.server.plugin.cpu import text_models
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


FULL = "full_attention"


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
