"""DSpark and DFlash: drafters that propose a whole block from the target's hidden states."""

from .checkpoint import check_target, load, save_compact, save_plain, target_identity
from .config import BlockConfig
from .drafter import BlockDrafter
from .errors import CheckpointError
from .model import BlockModel

__all__ = [
    "BlockConfig",
    "BlockDrafter",
    "BlockModel",
    "CheckpointError",
    "check_target",
    "load",
    "save_compact",
    "save_plain",
    "target_identity",
]
