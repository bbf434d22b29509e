"""Replaces torch's operations in which a row's result may depend on its batch, in the target's process on a CPU.

SGLang's and Transformers' models call them in many places: gates, routers, activations. So they are replaced once, in
torch, and not place by place.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from outrider.kernels import pointwise
from outrider.kernels.linear import pack, packed_linear, torch_linear

LARGEST = 1 << 22
"""Largest weight, in numbers, that is packed for each product: routers are smaller. SGLang's layers are packed once."""
_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    torch.compiler.set_stance("force_eager")  # compiled code differs between one row and two
    replace_functions(_library)
    setattr(torch.nn.functional, "linear", linear)  # noqa: B010  its type is torch's


def replace_functions(library: torch.library.Library) -> None:
    """Let torch compute the functions of `pointwise` with these, as long as the library lives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its own are replaced
        for function in (pointwise.sigmoid, pointwise.silu, pointwise.gelu, pointwise.softplus):
            name = function.__name__
            library.impl(name, function, "CPU")
            library.impl(f"{name}.out", partial(_into_out, function), "CPU")
            if name != "softplus":
                library.impl(f"{name}_", partial(_in_place, function), "CPU")


def _into_out(
    function: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, out: torch.Tensor, **more: Any
) -> torch.Tensor:
    return out.resize_(x.shape).copy_(function(x, *args, **more))


def _in_place(function: Callable[..., torch.Tensor], x: torch.Tensor, **more: Any) -> torch.Tensor:
    return x.copy_(function(x, **more))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Do torch's `linear` by our product in a forward of the target, where a layer multiplies by a plain matrix."""
    from sglang.srt.model_executor.forward_context import has_forward_context

    plain = x.dtype == weight.dtype and weight.dim() == 2 and weight.numel() <= LARGEST
    if not (plain and has_forward_context()):
        return torch_linear(x, weight, bias)
    return packed_linear(x, pack(weight, bias))
