"""Check if the model is a block-diffusion model, and if the settings go with one."""

from __future__ import annotations

from dataclasses import replace

from ..errors import UserError
from ..model.target import Model
from ..plugin.diffusion.target import DiffusionConfigError, recognise
from .parallel import TOGETHER
from .settings import Settings

REQUESTS = 32
"""Decoded at the same time, where nobody says how many."""
OF_DRAFTS = ("drafter_path", "gamma", "lookup_gamma", "lookup", "lookup_store", "denoising_steps", "denoising_order")
OF_DIFFUSION = ("unmasking", "unmasking_tokens", "unmasking_threshold", "block_size")


def with_diffusion(settings: Settings, model: Model) -> Settings:
    """Settings that say what the model is, where it is a block-diffusion model; raises UserError with one line."""
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
    """The flag of the first of these settings that is not the default."""
    defaults = Settings()
    for name in names:
        if getattr(settings, name) != getattr(defaults, name):
            return "--" + name.replace("_", "-")
    return None
