"""The attention backend of a GPU: chosen by its compute capability and the model, or refused with what to use."""

from __future__ import annotations

from typing import Any

from outrider.server.engine.target import Model
from outrider.server.errors import UserError
from outrider.server.plugin.attention_backends import Capability, fitting, unfit

FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""Of SGLang, by any of which verification may run."""


def choose(capability: Capability, model: Model, given: dict[str, Any]) -> dict[str, Any]:
    """SGLang's arguments. given: those of the command line, by the names of their fields.

    Raises UserError for a backend that cannot verify requests of different lengths here, naming those that can.
    """
    kind = {"windowed": has_windows(model.config), "latent": bool(model.config.get("kv_lora_rank"))}
    usable = fitting(capability, **kind)
    if not usable:
        special = ["multi-head latent attention"] * kind["latent"] + ["sliding windows"] * kind["windowed"]
        raise UserError(
            f"no attention backend verifies drafts of a model{' with ' if special else ''}{' and '.join(special)} on a "
            f"GPU of compute capability {'.'.join(map(str, capability))}; one of 9.0 has one"
        )
    for flag in FLAGS:
        name = given.get(flag)
        if name is not None and (reason := unfit(name, capability, **kind)) is not None:
            raise UserError(
                f"--{flag.replace('_', '-')} {name} cannot verify drafts here: {reason}; use {' or '.join(usable)}"
            )
    return {} if given.get("attention_backend") else {"attention_backend": usable[0]}


def has_windows(config: dict[str, Any]) -> bool:
    """Whether some layers see a sliding window only, by the model's config.json."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return any("sliding" in str(kind) for kind in kinds)
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", True) is not False
