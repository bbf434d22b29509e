"""Quantised checkpoints that a CPU can serve: AWQ and GPTQ with 4-bit codes in groups; all others are refused."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from ..model import families
from ..model.target import Model
from .settings import Settings

GROUP_SIZES = (32, 64, 128)


def check(settings: Settings, model: Model) -> None:
    """Raises UserError, with one line, where the model's weights are kept in a way that our kernels do not read."""
    config = model.config.get("quantization_config") or model.config.get("compression_config")
    if not config or settings.resolved_device != "cpu":
        return
    method = str(config.get("quant_method", "an unnamed method")).lower()
    if families.is_recurrent(model):
        raise UserError(f"{model.name} has a recurrent state and is quantised, which is not served; take plain weights")
    wrong = {"awq": _wrong_with_awq, "gptq": _wrong_with_gptq}.get(method, lambda config: f"it is {method}")(config)
    if wrong:
        raise UserError(
            f"{model.name} is quantised in a way that is not served on a CPU: {wrong}. Served are AWQ (version gemm) "
            "and GPTQ without desc_act, 4 bits in groups of 32, 64 or 128; take one of those, or one without"
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
