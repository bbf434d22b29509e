"""Makes the drafter that the configuration names and joins it to the loaded target."""

from __future__ import annotations

from typing import Any

from outrider.drafters.base import Drafter
from outrider.drafters.dummy import FixedDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.server.plugin.config import PluginConfig


def load_drafter(config: PluginConfig, runner: Any) -> Drafter | None:
    """The drafter for this server, or None where speculation is off.

    runner: SGLang's model runner of the target, its weights loaded.
    """
    if config.drafter == "off":
        return None
    if config.drafter == "ngram":
        return NgramDrafter(config.gamma, device=runner.device)
    if config.drafter == "fixed":
        return FixedDrafter(config.gamma)
    model = _load_block_drafter(config, runner)
    if not config.lookup:
        return model
    return LookupFirst(NgramDrafter(model.gamma, device=runner.device), model)


def _load_block_drafter(config: PluginConfig, runner: Any) -> Drafter:
    from outrider.drafters.block.drafter import BlockDrafter

    model, target = runner.model, runner.model_config.hf_text_config
    if not hasattr(model, "set_dflash_layers_to_capture"):
        raise ValueError(
            f"SGLang gives no hidden states of {type(model).__name__} to drafters; use --drafter ngram or off"
        )
    drafter = BlockDrafter.load(
        config.drafter_path,
        embedding=model.model.embed_tokens.weight[: target.vocab_size],
        head=model.lm_head.weight[: target.vocab_size],
        target_config=target,
        gamma=config.gamma,
        dtype=runner.dtype,
    )
    model.set_dflash_layers_to_capture(list(drafter.target_layers))
    return drafter
