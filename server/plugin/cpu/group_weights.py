"""AWQ and GPTQ checkpoints on a CPU: SGLang loads their tensors, our kernels multiply with their 4-bit codes.

A weight is (q - z) * s with one zero point and one scale for each group of neighbours in depth (arXiv:2306.00978,
arXiv:2210.17323). Both methods pack eight codes into an int32: AWQ along the outputs in a special order, GPTQ along the
depth. GPTQ packs zero points along the outputs, in its first format as z - 1.
"""

from typing import Any

import torch

from outrider.kernels.blocks import group_blocks, pack_blocks
from outrider.kernels.weights import multiply

from ..config import PluginConfig

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of outputs 0 to 7 among the groups of four bits of AWQ's int32."""
IN_ORDER = tuple(range(8))


def register() -> None:
    """Replace SGLang's configurations, which have kernels only for GPUs and for its own CPU engine."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.awq.awq import AWQConfig
    from sglang.srt.layers.quantization.awq.schemes import AWQLinearScheme
    from sglang.srt.layers.quantization.gptq.gptq import GPTQConfig
    from sglang.srt.layers.quantization.gptq.schemes import GPTQLinearScheme

    class AwqScheme(AWQLinearScheme):
        def _init_kernel(self, quant_config: AWQConfig) -> BlockKernel:
            return AwqKernel()

        def create_weights(self, *args: Any, **kwargs: Any) -> None:
            super().create_weights(*args, **kwargs | EXACT_SCALES)

    class GptqScheme(GPTQLinearScheme):
        def _init_kernel(self, quant_config: GPTQConfig) -> BlockKernel:
            return GptqKernel(first_format=quant_config.checkpoint_format != "gptq_v2")

        def create_weights(self, *args: Any, **kwargs: Any) -> None:
            super().create_weights(*args, **kwargs | EXACT_SCALES)

    class AwqConfig(AWQConfig):
        get_supported_act_dtypes = staticmethod(_supported_types)

        def get_linear_scheme(self, layer: torch.nn.Module) -> AwqScheme:
            return AwqScheme(self)

    class GptqConfig(GPTQConfig):
        get_supported_act_dtypes = staticmethod(_supported_types)

        def get_linear_scheme(self, layer: torch.nn.Module) -> GptqScheme:
            return GptqScheme(self)

    QUANTIZATION_METHODS.update(awq=AwqConfig, gptq=GptqConfig)


EXACT_SCALES = {"params_dtype": torch.float32}
"""A checkpoint's scales are float16 or bfloat16: read as the model's type they could change."""


def _supported_types() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float32]


class BlockKernel:
    """A kernel in SGLang's sense: prepares a layer's weight once it is loaded, and multiplies with it."""

    use_shuffle = False  # for SGLang's GPTQ: a checkpoint with a special order

    def unpack(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [outputs, depth] and zero points [outputs, groups]."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        """Lay the codes out for our kernel; the checkpoint's tensors are freed."""
        codes, zeros = self.unpack(layer)
        raw, kind = group_blocks(codes, zeros, layer.scales.data.T)
        outputs, depth = codes.shape
        activations = PluginConfig.from_env().activations
        layer.packed = pack_blocks(raw, kind, outputs, depth, activations=activations)
        for name in ("qweight", "qzeros", "scales", "g_idx"):
            if hasattr(layer, name):
                delattr(layer, name)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = multiply(x, layer.packed)
        return out if bias is None else out.add_(bias)


class AwqKernel(BlockKernel):
    def unpack(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return unpacked(layer.qweight.data, AWQ_ORDER).T, unpacked(layer.qzeros.data, AWQ_ORDER).T


class GptqKernel(BlockKernel):
    def __init__(self, first_format: bool) -> None:
        self.missing = int(first_format)

    def unpack(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = unpacked(layer.qzeros.data, IN_ORDER).T
        return unpacked(layer.qweight.data.T, IN_ORDER), zeros + self.missing


def unpacked(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Unpack int32 words [rows, n] to uint8 [rows, 8 n]: number i of a word is in its four bits order[i]."""
    shifts = torch.tensor(order, dtype=torch.int32) * 4
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)
