"""SGLang's layers with weights from a GGUF file's blocks."""

from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch
from int_blocks import reference_int_block_linear

from outrider.kernels.cpu import native
from outrider.kernels.linear import pack, packed_linear
from outrider.server.model import gguf_model
from outrider.server.plugin import activate
from outrider.server.plugin.loading.gguf_weights import GgufWeights

pytestmark = pytest.mark.skipif(not native.available(), reason="blocks are kept by the compiled kernels")
OUT = "model.layers.0.self_attn.o_proj"


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GgufWeights:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return GgufWeights(gguf_model.prepare(tiny_gguf.write(tmp_path / "tiny.gguf", kind="Q8_0"), "tiny"))


@pytest.fixture
def config(weights: GgufWeights) -> Any:
    activate()
    from outrider.server.plugin.loading.gguf_loader import BlocksConfig

    return BlocksConfig(weights)


def linear(config: Any, inputs: int) -> Any:
    from sglang.srt.layers.linear import ReplicatedLinear

    return ReplicatedLinear(
        inputs, tiny_gguf.WIDTH, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix=OUT
    )


def test_a_linear_layer_that_rounds_activations(config: Any, weights: GgufWeights) -> None:
    config.weights.activations = "int8"
    layer, name = linear(config, tiny_gguf.HEADS * tiny_gguf.HEAD), f"{OUT}.weight"
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, tiny_gguf.HEADS * tiny_gguf.HEAD, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounded = reference_int_block_linear(x, weights.raw(name), "Q8_0", tiny_gguf.WIDTH)
    assert torch.equal(layer(x)[0], rounded)
    assert not torch.equal(rounded, packed_linear(x, pack(weights.expanded(name))))


def test_a_shape_that_differs_from_the_config(config: Any) -> None:
    with pytest.raises(ValueError, match=r"o_proj.weight is \[64, 128\] in the file, \[64, 96\] by config.json"):
        linear(config, 96)
