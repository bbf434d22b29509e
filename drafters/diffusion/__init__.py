"""DEER and SpecDiff: diffusion drafters, which need only the target's tokens."""

from .drafter import DiffusionDrafter
from .model import DiffusionModel

__all__ = ["DiffusionDrafter", "DiffusionModel"]
