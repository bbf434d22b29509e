"""The network of each kind of drafter checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from .block.checkpoint import load_as
from .block.config import BlockConfig
from .block.model import BlockModel, DraftModel
from .diffusion.model import DiffusionModel


def network_of(config: BlockConfig) -> type[DraftModel]:
    """The class that holds the weights of such a checkpoint."""
    return DiffusionModel if config.kind in DiffusionModel.kinds else BlockModel


def load_any(folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> DraftModel:
    """Read a drafter folder of any kind; raises CheckpointError."""
    return load_as(network_of(BlockConfig.read(folder)), folder, dtype=dtype)
