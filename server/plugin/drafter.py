"""Makes the drafter that the configuration names."""

from __future__ import annotations

from typing import Any

from outrider.drafters.base import Drafter
from outrider.drafters.fixed import FixedDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.server.plugin_config import PluginConfig


def load_drafter(config: PluginConfig, runner: Any) -> Drafter | None:
    """The drafter for this server, or None where speculation is off."""
    if config.drafter == "off":
        return None
    if config.drafter == "ngram":
        return NgramDrafter(config.gamma)
    if config.drafter == "fixed":
        return FixedDrafter(config.gamma)
    raise ValueError(f"unknown drafter {config.drafter!r}; known: ngram, off")
