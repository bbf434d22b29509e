"""Check quantised, recurrent and block-diffusion models, and adapt the settings to them.

Of quantised checkpoints a CPU serves only AWQ and GPTQ, with 4-bit codes in groups.
"""

from dataclasses import replace
from typing import Any

from ..errors import UserError
from ..model import families
from ..model.target import Model
from ..plugin.diffusion.target import DiffusionConfigError, recognise
from .memory import REQUESTS
from .parallel import TOGETHER
from .settings import Settings

GROUP_SIZES = (32, 64, 128)
OF_DRAFTS = ("drafter_path", "gamma", "lookup", "lookup_store", "denoising_steps")
OF_DIFFUSION = ("unmasking", "unmasking_tokens", "unmasking_threshold", "block_size")


def check_quantized(settings: Settings, model: Model) -> None:
    """Raise UserError, with one line, if our kernels do not read the format of the model's weights."""
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
            "and GPTQ without desc_act, 4 bits in groups of 32, 64 or 128; take such a checkpoint, or plain weights"
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


def with_recurrent(settings: Settings, model: Model) -> Settings:
    """Bound the requests of a recurrent model by its states; leave other models alone.

    Raises UserError for settings that would divide states over ranks or send them.
    """
    if not families.is_recurrent(model):
        return settings
    if settings.parallel.tp_size > 1:
        raise UserError(f"{model.name} keeps a state of each request, which --tp-size does not spread; leave it out")
    if settings.parallel.role:
        raise UserError(f"{model.name} keeps a state of each request, which stays in one server; {TOGETHER}")
    return replace(settings, max_running_requests=settings.max_running_requests or REQUESTS)


def with_diffusion(settings: Settings, model: Model) -> Settings:
    """Add a block-diffusion model's description to the settings. Raises UserError with one line."""
    try:
        target = recognise(model.config, settings.block_size)
    except DiffusionConfigError as error:
        raise UserError(f"{model.name} cannot be served: in its config.json, {error}") from None
    if target is None:
        if (name := _changed(settings, OF_DIFFUSION)) is not None:
            raise UserError(f"{name} is for block-diffusion models, and {model.name} is none")
        return settings
    if settings.drafter not in ("auto", "off"):
        raise UserError(
            f"--drafter {settings.drafter} is for models that write from left to right; {model.name} is a "
            "block-diffusion model: leave it out"
        )
    name = "--planner threshold" if settings.planner == "threshold" else _changed(settings, OF_DRAFTS)
    if name is not None:
        raise UserError(f"{name} is for drafters, and {model.name} is a block-diffusion model: leave it out")
    if settings.resolved_device != "cpu":
        raise UserError(f"{model.name} is a block-diffusion model, which is served on a CPU alone; say --device cpu")
    if settings.parallel.tp_size > 1:
        raise UserError(f"{model.name} is a block-diffusion model, which --tp-size does not spread; leave it out")
    if settings.parallel.role:
        raise UserError(f"{model.name} is a block-diffusion model, which stays in one server; {TOGETHER}")
    if settings.unmasking_tokens > target.block_size:
        raise UserError(
            f"--unmasking-tokens is at most the block's {target.block_size} tokens, not {settings.unmasking_tokens}"
        )
    return replace(settings, drafter="off", diffusion=target)


def _changed(settings: Settings, names: tuple[str, ...]) -> str | None:
    """Return the flag of the first setting in `names` that differs from its default."""
    defaults = Settings()
    for name in names:
        if getattr(settings, name) != getattr(defaults, name):
            return "--" + name.replace("_", "-")
    return None
