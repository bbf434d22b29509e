"""The config.json of models that transformers knows by their own code alone, which is not run here."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig


class _WithTheta:
    """SGLang's SDAR asks for rope_theta where transformers keeps it no longer, and would take 10,000 instead."""

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


def register() -> None:
    for config in (SdarConfig, SdarMoeConfig, Llada2MoeConfig, FastDllmConfig, A2dQwen3Config):
        AutoConfig.register(config.model_type, config, exist_ok=True)
