"""The LoRA adapters of `--lora-paths`, checked before anything slow begins."""

from dataclasses import replace
from pathlib import Path

from outrider.drafters.adapter_folder import AdapterFolder

from ..errors import UserError
from ..model.target import Model
from .settings import Settings


def with_adapters(settings: Settings, model: Model) -> Settings:
    """Return settings with the adapters' folders made absolute; raises UserError where they cannot be served."""
    if not settings.has_adapters:
        return settings
    if settings.resolved_device == "cuda" and not settings.lora_paths:
        raise UserError("on a GPU --enable-lora goes with --lora-paths: memory is reserved for their ranks and layers")
    if settings.parallel.tp_size > 1:
        raise UserError("adapters are not divided over --tp-size ranks; leave one of them out")
    if settings.diffusion is not None:
        raise UserError(f"{model.name} is a block-diffusion model, which takes no adapters; leave --lora-paths out")
    folders: dict[str, Path] = {}
    for each in settings.lora_paths:
        name, _, folder = each.partition("=")
        if not name or not folder:
            raise UserError(f"--lora-paths takes NAME=FOLDER, not {each!r}")
        if name in folders or name == (settings.served_model_name or model.name):
            raise UserError(f"--lora-paths: the name {name} is taken")
        folders[name] = checked(name, folder, settings, model)
    return replace(settings, lora_paths=tuple(f"{name}={folder}" for name, folder in folders.items()))


def checked(name: str, folder: str, settings: Settings, model: Model) -> Path:
    """Return the adapter's folder, absolute; raises UserError where it cannot be served."""
    path = Path(folder).expanduser().absolute()
    try:
        adapter = AdapterFolder.open(path)
        adapter.check(model.config)
        if settings.resolved_device == "cuda":
            adapter.check_for_sglang()
    except ValueError as error:
        raise UserError(f"the adapter {name} in {path}: {error}") from None
    return path
