"""Contents of a drafter checkpoint folder of any kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .block import checkpoint as block
from .block.checkpoint import load_as
from .block.config import BlockConfig
from .block.model import BlockModel, DraftModel, TrainedModel
from .config_file import read_json
from .diffusion.model import DiffusionModel
from .eagle import checkpoint as eagle
from .eagle.config import EagleConfig, is_eagle
from .eagle.model import EagleModel
from .mtp import checkpoint as mtp
from .mtp.config import MtpConfig, has_layout

Config = BlockConfig | EagleConfig | MtpConfig


def network_of(config: BlockConfig) -> type[DraftModel]:
    """Return the class that holds the weights of such a checkpoint."""
    return DiffusionModel if config.kind in DiffusionModel.kinds else BlockModel


def load_any(folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> DraftModel:
    """Read a drafter folder of any kind; raises CheckpointError."""
    return load_as(network_of(BlockConfig.from_json(read_json(folder))), folder, dtype=dtype)


def read_config(folder: str | Path) -> Config:
    """Read the shape of a folder's drafter, or of the MTP layer in a target's folder; raises CheckpointError.

    Its `kind` is as `registry.serving` expects it.
    """
    config = read_json(folder)
    if has_layout(config):
        return MtpConfig.from_json(config)
    return (EagleConfig if is_eagle(config) else BlockConfig).from_json(config)


def layers_of(folder: str | Path, count: int) -> tuple[int, ...]:
    """Return the target layers that a folder's drafter reads, for a target with `count` layers; raises
    CheckpointError."""
    config = read_config(folder)
    if isinstance(config, MtpConfig):
        return ()
    return config.layers_of(count) if isinstance(config, EagleConfig) else config.target_layers


def not_trained(config: Config) -> str:
    """Name the part of a drafter's shape that is served but cannot be trained here; "" if there is none."""
    if isinstance(config, MtpConfig):
        return "a target's own MTP layer"
    if isinstance(config, EagleConfig):
        return ""
    if (config.logit_scale, config.logit_cap) != (1.0, 0.0) and not config.gemma:
        return "scaled or capped logits"
    return "layers of Gemma 4's shape" if config.gemma else "layers with sliding windows" if config.windows else ""


def save(model: TrainedModel, head: torch.Tensor, folder: str | Path) -> None:
    """Write a trained drafter in the format that is served; head: the rows [V', d] that it drafts with."""
    if isinstance(model, EagleModel):
        eagle.save(model.stored, head, folder)
    else:
        assert isinstance(model, DraftModel)
        block.save_compact(model, folder)


def memory(folder: str | Path, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a folder's drafter in `dtype`: of its weights, and of its state per token of a text."""
    config = read_json(folder)
    module = mtp if has_layout(config) else eagle if is_eagle(config) else block
    return module.memory(folder, dtype)


def check_target(folder: str | Path, target: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a folder's drafter does not fit a target or is incomplete, without reading its
    weights.

    target: the target's config; fields that it lacks are not compared.
    """
    config = read_config(folder)
    if isinstance(config, MtpConfig):
        mtp.check_target(mtp.check_folder(folder), target)
    elif isinstance(config, EagleConfig):
        config.layers_of(int(target.get("num_hidden_layers") or 0))
        eagle.check_target(config, eagle.stored_shapes(folder), target.get("vocab_size"), target.get("hidden_size"))
    else:
        block.check_target(config, dict(target))
        block.stored_shapes(folder)


def check(folder: str | Path, target: Mapping[str, Any]) -> None:
    """Read a folder's weights; raises CheckpointError where they are damaged or do not fit, as `check_target`."""
    check_target(folder, target)
    config = read_json(folder)
    if has_layout(config):
        mtp.load(folder)
    elif is_eagle(config):
        eagle.load(folder, int(target.get("num_hidden_layers") or 0))
    else:
        load_any(folder)
