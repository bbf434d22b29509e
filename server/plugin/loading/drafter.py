"""Makes the drafter that the configuration names, for the target as SGLang has loaded it."""

from __future__ import annotations

from typing import Any

from outrider.drafters import registry
from outrider.drafters.base import Drafter
from outrider.drafters.target import Rows, Target
from outrider.server.plugin.config import PluginConfig


def load_drafter(config: PluginConfig, runner: Any) -> Drafter | None:
    """The drafter for this server, or None where speculation is off.

    runner: SGLang's model runner of the target, its weights loaded.
    """
    if config.drafter == "off":
        return None
    target = loaded_target(runner)
    if registry.find(config.drafter).needs_hidden_states and target.capture_layers is None:
        raise ValueError(
            f"SGLang gives no hidden states of {type(runner.model).__name__} to drafters; use --drafter ngram or off"
        )
    return registry.make(
        config.drafter, target, gamma=config.gamma, checkpoint=config.drafter_path, lookup_gamma=config.lookup_gamma
    )


def loaded_target(runner: Any) -> Target:
    """What drafters may know of the model in SGLang's model runner."""
    model, config = runner.model, runner.model_config.hf_text_config

    def weights() -> tuple[Rows, Rows]:
        return _rows(model.model.embed_tokens, config.vocab_size), _rows(model.lm_head, config.vocab_size)

    return Target(
        config=config,
        weights=weights,
        dtype=runner.dtype,
        device=runner.device,
        capture_layers=getattr(model, "set_dflash_layers_to_capture", None),
    )


def _rows(layer: Any, count: int) -> Rows:
    """The weight of an embedding or a head without its padding, or what reads its rows where it is kept in blocks."""
    return layer.rows.first(count) if hasattr(layer, "rows") else layer.weight[:count]
