"""Lets SGLang load a folder that was prepared from a GGUF file.

On a CPU with compiled kernels, weights stay in the file's blocks. Each layer takes its own from the file by name, as a
quantisation of SGLang's; only norms and biases pass through the model's `load_weights`. Everywhere else (a GPU, int8
weights, several ranks, plain torch) all are expanded one by one and loaded like any model's.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig, QuantizeMethodBase
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.loader import DefaultModelLoader, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype

from outrider.kernels.cpu import native

from ..config import PluginConfig
from ..cpu.fused_ops import apply_linear
from .expert_blocks import BlockExperts
from .gguf_weights import GgufWeights, is_prepared


def loader_for_gguf(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """Wrap SGLang's `get_model_loader`: return our loader for prepared folders."""
    if model_config is not None and is_prepared(Path(model_config.model_path)):
        return GgufLoader(load_config)
    return original(load_config, model_config)


class GgufLoader(DefaultModelLoader):
    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        weights, device = _weights(model_config), torch.device(device_config.device)
        config = BlocksConfig(weights) if _can_keep_blocks(device) else None
        with set_default_torch_dtype(model_config.dtype):
            with device:
                model = _initialize_model(model_config, self.load_config, config)
            left = weights.everything() if config is None else config.not_taken()
            self.load_weights_and_postprocess(model, left, device)
        return model.eval()


def _weights(model_config: Any) -> GgufWeights:
    return GgufWeights(Path(model_config.model_path), PluginConfig.from_env().activations)


def _can_keep_blocks(device: torch.device) -> bool:
    plain = PluginConfig.from_env().quantization == "none" and torch.distributed.get_world_size() == 1
    return plain and device.type == "cpu" and native.available()


class BlocksConfig(QuantizationConfig):
    """A quantisation to SGLang: gives each layer the method that takes its weight from the file."""

    def __init__(self, weights: GgufWeights) -> None:
        super().__init__()
        self.weights = weights
        self.taken: set[str] = set()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, FusedMoE):
            experts = BlockExperts(self.weights, prefix)
            self.taken.update(experts.names(layer.num_experts))
            return experts
        if isinstance(layer, LinearBase):
            method: QuantizeMethodBase = BlockLinear(self.weights, prefix)
        elif isinstance(layer, VocabParallelEmbedding) and self.weights.kind(prefix) is not None:
            method = BlockEmbedding(self.weights, prefix, head=self.weights.tied or isinstance(layer, ParallelLMHead))
        else:
            return None
        if not (isinstance(layer, ParallelLMHead) and self.weights.tied):  # the embedding takes it, if any layer does
            self.taken.update(self.weights.parts(prefix))
        return method

    def not_taken(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights that no layer takes from the file itself: norms, biases, an embedding that is not in blocks."""
        return ((name, self.weights.expanded(name)) for name in self.weights.stored if name not in self.taken)

    def get_name(self) -> str:
        return "outrider"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    def get_scaled_act_names(self) -> list[str]:
        return []

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        raise NotImplementedError("made by GgufLoader, from the file")


class BlockLinear(LinearMethodBase):
    """A linear layer that multiplies with the file's blocks; `layer.packed` as in all our layers."""

    apply = apply_linear

    def __init__(self, weights: GgufWeights, prefix: str) -> None:
        self.weights, self.prefix = weights, prefix

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        names = self.weights.parts(self.prefix)
        for name, rows in zip(names, output_partition_sizes if len(names) > 1 else [output_size], strict=True):
            _check(self.weights, name, [rows, input_size])
        self.dtype = params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = self.weights.prepared(self.prefix, self.dtype)


class BlockEmbedding(QuantizeMethodBase):
    """An embedding that reads rows from the file's blocks, or a head that multiplies with them, or both."""

    apply = apply_linear

    def __init__(self, weights: GgufWeights, prefix: str, head: bool) -> None:
        self.weights, self.prefix, self.head = weights, prefix, head

    def create_weights(
        self,
        layer: Any,
        input_size: int,
        output_partition_sizes: list[int],
        *sizes: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        (name,) = self.weights.parts(self.prefix)
        _check(self.weights, name, [layer.org_vocab_size, input_size])
        self.dtype = params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.rows = self.weights.rows(self.prefix)
        if self.head:
            layer.packed = self.weights.prepared(self.prefix, self.dtype)

    def embedding(self, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        return layer.rows[ids].to(self.dtype)


def _check(weights: GgufWeights, name: str, shape: list[int]) -> None:
    stored = weights.stored[name].shape
    if stored != shape:
        raise ValueError(f"{name} is {stored} in the file, {shape} by config.json")
