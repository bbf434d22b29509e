"""Quantised checkpoints that a CPU can serve: AWQ and GPTQ with 4-bit codes in groups; all others are refused."""

from __future__ import annotations

from typing import Any

from outrider.kernels.cpu import native

from ..errors import UserError
from ..model.target import Model
from ..plugin.loading.gguf_weights import is_prepared
from .settings import Settings

GROUP_SIZES = (32, 64, 128)


def check(settings: Settings, model: Model) -> None:
    """Raises UserError, with one line, where the model's weights are kept in a way that our kernels do not read."""
    config = model.config.get("quantization_config") or model.config.get("compression_config")
    if not config or settings.resolved_device != "cpu":
        return
    method = str(config.get("quant_method", "an unnamed method")).lower()
    wrong = {"awq": _wrong_with_awq, "gptq": _wrong_with_gptq}.get(method, lambda config: f"it is {method}")(config)
    if wrong:
        raise UserError(
            f"{model.name} is quantised in a way that is not served on a CPU: {wrong}. Served are AWQ (version gemm) "
            "and GPTQ without desc_act, 4 bits in groups of 32, 64 or 128; take one of those, or one without"
        )


def check_activations(settings: Settings, model: Model) -> None:
    """Raises UserError, with one line, where activations are to be rounded but no weight is multiplied in blocks."""
    if settings.activations == "float":
        return
    if settings.quantization != "none":
        raise UserError(f"--quantization {settings.quantization} rounds activations as well; leave --activations out")
    if not native.available():
        raise UserError("--activations int8 needs the compiled kernels, which do not run here; leave it out")
    in_file = model.folder is not None and is_prepared(model.folder)
    if in_file and settings.parallel.tp_size > 1:
        raise UserError("--activations int8: a GGUF file over several ranks is expanded; leave it out")
    if not in_file and not model.config.get("quantization_config") and not model.config.get("compression_config"):
        raise UserError(
            f"--activations int8 is for weights in blocks (GGUF, AWQ, GPTQ); {model.name} has none. "
            "--quantization int8 rounds its weights as well"
        )


def _wrong_with_awq(config: dict[str, Any]) -> str | None:
    if str(config.get("version", "gemm")).lower() != "gemm":
        return f"AWQ version {config['version']}"
    if not config.get("zero_point", True):
        return "AWQ without zero points"
    return _wrong_with_groups(
        config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    )


def _wrong_with_gptq(config: dict[str, Any]) -> str | None:
    if config.get("desc_act"):
        return "GPTQ with desc_act"
    form = config.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        return f"GPTQ in the format {'marlin' if config.get('is_marlin_format') else form}"
    if any((config.get("dynamic") or {}).values()):
        return "GPTQ with rules of their own for some layers"
    if config.get("lm_head"):
        return "GPTQ with a quantised head"
    return _wrong_with_groups(config.get("bits"), config.get("group_size"))


def _wrong_with_groups(bits: Any, size: Any) -> str | None:
    if bits != 4:
        return f"{bits} bits"
    return None if size in GROUP_SIZES else f"groups of {size}"
