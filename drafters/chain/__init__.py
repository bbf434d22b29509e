"""Drafters of one layer that chains over its own output: EAGLE-3 heads, MTP layers."""

from .drafter import ChainDrafter
from .network import ChainNetwork

__all__ = ["ChainDrafter", "ChainNetwork"]
