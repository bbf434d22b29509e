"""SGLang's layers of experts on a CPU, by our products: in torch a sum's order depends on the number of rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from outrider.kernels.experts import run_experts
from outrider.kernels.fused import gelu_mul, silu_mul
from outrider.kernels.linear import pack
from outrider.kernels.pointwise import sigmoid

from .. import must_take


def register() -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    must_take.replace(UnquantizedFusedMoEMethod, "process_weights_after_loading", _pack)
    must_take.replace(UnquantizedFusedMoEMethod, "apply", apply_experts)


def _pack(self: Any, layer: Any) -> None:
    """Lay out each expert's weights for our kernels, once they are loaded; the originals are freed."""
    products = []
    for name in ("w13_weight", "w2_weight"):
        weight, bias = getattr(layer, name), getattr(layer, f"{name}_bias", None)
        products.append([pack(each, None if bias is None else bias[e]) for e, each in enumerate(weight.data)])
        weight.data = weight.data.new_empty(0)
    layer.packed_experts = list(zip(*products, strict=True))
    layer.between = activation_of(layer.moe_runner_config)


def activation_of(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function between the products of SGLang's experts."""
    if config.is_gated and not config.apply_router_weight_on_input:
        if config.activation == "silu" and config.gemm1_alpha is not None:
            return partial(_clamped, alpha=config.gemm1_alpha, limit=config.gemm1_clamp_limit)
        if config.activation in ("silu", "gelu"):
            return silu_mul if config.activation == "silu" else gelu_mul
    raise ValueError(f"experts with the activation {config.activation} are not served on a CPU")


def _clamped(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return gpt-oss's activation of x [M, 2 * I], with gates at even places."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * sigmoid(gate * alpha) * (up + 1)


def apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Return the sum of the chosen experts' outputs. A row's are added in the order of its choice, so that they depend
    on no other row."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    weights, ids, _ = dispatch_output.topk_output
    return StandardCombineInput(
        hidden_states=run_experts(dispatch_output.hidden_states, weights, ids, layer.packed_experts, layer.between)
    )
