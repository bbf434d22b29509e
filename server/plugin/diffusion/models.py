"""Registers block-diffusion models with SGLang: their config.json, their layers, and its dllm mode's settings."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from .. import must_take
from .target import FAMILIES, DiffusionTarget

PROMPT_HOLDS_MASK = "the prompt has the mask token ({name}), which stands for text that is not there yet; leave it out"


def register(target: DiffusionTarget) -> None:
    """Register before SGLang reads its settings, in each of its processes."""
    from sglang.srt.dllm import algorithm
    from sglang.srt.dllm.config import DllmConfig

    from . import rounds
    from .algorithm import NAME
    from .spiffy import Spiffy

    register_configs()
    _register_layers()
    algorithm.algo_name_to_cls[NAME] = Spiffy

    class Config(DllmConfig):
        def validate_request(self, req: Any) -> str | None:
            if self.mask_id not in req.origin_input_ids:
                return None
            name = req.tokenizer.convert_ids_to_tokens(self.mask_id) if req.tokenizer else self.mask_id
            return PROMPT_HOLDS_MASK.format(name=name)

    def from_server_args(server_args: Any) -> DllmConfig | None:
        from sglang.srt.arg_groups.overrides import resolving_view

        given = resolving_view(server_args)
        if given.dllm_algorithm is None:
            return None
        return Config(
            algorithm=given.dllm_algorithm,
            algorithm_config={},
            block_size=target.block_size,
            mask_id=target.mask_token_id,
            max_running_requests=given.max_running_requests,
            first_done_first_out_mode=True,
        )

    must_take.replace(DllmConfig, "from_server_args", staticmethod(from_server_args))
    rounds.register()


class _WithTheta:
    """SGLang's SDAR reads rope_theta, which transformers no longer keeps, and would use 10,000 instead."""

    def __post_init__(self, **fields: Any) -> None:
        super().__post_init__(**fields)  # type: ignore[misc]
        self.rope_theta = self.rope_parameters["rope_theta"]  # type: ignore[attr-defined]


class SdarConfig(_WithTheta, Qwen3Config):
    model_type = "sdar"


class SdarMoeConfig(_WithTheta, Qwen3MoeConfig):
    model_type = "sdar_moe"


class Llada2MoeConfig(PreTrainedConfig):
    model_type = "llada2_moe"


class FastDllmConfig(Qwen2Config):
    model_type = "Fast_dLLM_Qwen"


class A2dQwen3Config(Qwen3Config):
    model_type = "a2d-qwen3"


def register_configs() -> None:
    """Add the config.json of models that transformers only knows through their own code, which is not run here."""
    for config in (SdarConfig, SdarMoeConfig, Llada2MoeConfig, FastDllmConfig, A2dQwen3Config):
        AutoConfig.register(config.model_type, config, exist_ok=True)


def _register_layers() -> None:
    from sglang.srt.models.llada2 import LLaDA2MoeSparseMoeBlock
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.models.sdar import SDARForCausalLM
    from sglang.srt.models.sdar_moe import SDARMoeForCausalLM

    for model in (SDARForCausalLM, SDARMoeForCausalLM):
        must_take.replace(model, "load_weights", _tied(model.load_weights))
    experts = "_forward_router_experts"
    must_take.replace(LLaDA2MoeSparseMoeBlock, experts, _scaled(LLaDA2MoeSparseMoeBlock._forward_router_experts))

    for architecture, family in FAMILIES.items():
        if family.layers:
            module, _, name = family.layers.partition(":")
            ModelRegistry.models[architecture] = getattr(import_module(module), name)


def _tied(load_weights: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Load a tied head as the embedding: SGLang's SDAR looks for a separate head although it has tied them."""

    def load(model: Any, weights: Any) -> None:
        tied, model.config.tie_word_embeddings = model.config.tie_word_embeddings, False
        try:
            load_weights(model, weights)
        finally:
            model.config.tie_word_embeddings = tied

    return load


def _scaled(experts: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Apply `routed_scaling_factor`, which SGLang's experts leave out on a CPU."""

    def scaled(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        out = experts(block, hidden_states)
        return out * block.routed_scaling_factor if out.device.type == "cpu" else out

    return scaled
