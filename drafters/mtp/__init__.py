"""MTP layers: drafters that come with a target, in its own checkpoint."""

from .config import MtpConfig
from .drafter import MtpDrafter

__all__ = ["MtpConfig", "MtpDrafter"]
