"""Models with a recurrent state per request."""

from pathlib import Path

import pytest
from refusals import refuses

from outrider.server.machine import hardware
from outrider.server.model.recurrent import recurrent_layers, state_bytes
from outrider.server.model.target import Model
from outrider.server.settings import memory, model_kinds
from outrider.server.settings.model_kinds import with_recurrent
from outrider.server.settings.settings import Settings

CPU = {"device": "cpu", "dtype": "bfloat16"}
QWEN_3_5 = {
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 1024,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "max_position_embeddings": 4096,
}  # fmt: skip
"""Fields of Qwen3.5-0.8B, with 18 such layers among 24."""


def model_of(**config: object) -> Model:
    return Model("/m", "m", {"architectures": ["Qwen3_5ForCausalLM"], **QWEN_3_5, **config}, Path("/m"))


def test_requests_are_bounded() -> None:
    assert with_recurrent(Settings(**CPU), model_of()).max_running_requests == memory.REQUESTS
    chosen = Settings(**CPU, max_running_requests=3)
    assert with_recurrent(chosen, model_of()) == chosen
    other = Settings(**CPU)
    assert with_recurrent(other, model_of(architectures=["LlamaForCausalLM"])) is other


def test_states_are_not_divided_over_ranks() -> None:
    spread = Settings(**CPU, sglang_flags=("--tp-size", "2"))
    refuses("which --tp-size does not spread", with_recurrent, spread, model_of())
    llama = model_of(architectures=["LlamaForCausalLM"])
    assert with_recurrent(spread, llama) is spread


def test_quantised_weights_are_refused() -> None:
    model_kinds.check_quantized(Settings(**CPU), model_of())
    awq, said = model_of(quantization_config={"quant_method": "awq"}), "^m has a recurrent state and is quantised"
    refuses(f"{said}, which is not served", model_kinds.check_quantized, Settings(**CPU), awq)


def test_layers_are_listed_or_by_their_interval() -> None:
    assert recurrent_layers(QWEN_3_5) == 18
    assert recurrent_layers({**QWEN_3_5, "layer_types": ["linear_attention"] * 23 + ["full_attention"]}) == 23
    assert recurrent_layers({"num_hidden_layers": 24, "layer_types": ["full_attention"] * 24}) == 0


def test_the_plan_has_room_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has 16 matrices of 128 by 128 and three inputs of 6144 channels, of four bytes."""
    assert state_bytes(QWEN_3_5) == 18 * 4 * (16 * 128 * 128 + 3 * 6144)
    assert memory.kv_bytes_per_token(QWEN_3_5, 2) == 6 * 2 * 2 * 256 * 2
    monkeypatch.setattr(hardware, "available_memory", lambda: memory.PROCESS_BYTES + 2**30)
    plan = memory.plan(Settings(**CPU, max_running_requests=8), model_of())
    assert plan.max_total_tokens
    assert plan.states == 3 * 8
    alone = memory.plan(Settings(**CPU, max_running_requests=8, disable_radix_cache=True), model_of())
    assert alone.states == 8
    assert memory.plan(Settings(**CPU), model_of(**{"linear_num_value_heads": 0})).states is None
    many = Settings(**CPU, max_running_requests=64)
    refuses(r"states 3.7 GiB, .*; lower --max-running-requests", memory.plan, many, model_of())
