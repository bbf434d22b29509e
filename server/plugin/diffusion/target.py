"""Block-diffusion models and their parameters, read from config.json.

A block-diffusion model fills blocks of tokens from left to right. The tokens of the open block are masked at first, see
each other and all blocks before, and are revealed in several denoising steps.

Fields of a config.json, by SDAR's names where it has them:

block_size: tokens of a block. (Fast-dLLM v2 calls it bd_size.)
mask_token_id: of the token at places that are not revealed yet.
shift: the states at a position predict the token after it, as in the autoregressive model it was made from.
context_mask: the context of a position of a finished block or of the prompt: "block", its whole block and all before;
    "causal", itself and all before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTEXT_MASKS = ("block", "causal")
UNMASKINGS = ("threshold", "static")
"""Policies that reveal tokens, see `policy`."""


class DiffusionConfigError(ValueError):
    """A config.json without a block diffusion that can be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionTarget:
    """Parameters of a block-diffusion model; see the module."""

    block_size: int
    mask_token_id: int
    shift: bool = False
    causal_context: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters that the config.json of an architecture leaves out; 0: it has them. layers: SGLang's class with its
    layers; "" where SGLang knows the architecture."""

    layers: str = ""
    block_size: int = 0
    mask_token_id: int = 0
    shift: bool = False


FAMILIES = {
    "SDARForCausalLM": Family(block_size=4, mask_token_id=151669),
    "SDARMoeForCausalLM": Family(block_size=4, mask_token_id=151669),
    "LLaDA2MoeModelLM": Family(block_size=32, mask_token_id=156895),
    "Fast_dLLM_QwenForCausalLM": Family(
        layers="sglang.srt.models.qwen2:Qwen2ForCausalLM", block_size=32, mask_token_id=151665, shift=True
    ),
    "A2DQwen3LMHeadModel": Family(  # OPDLM
        layers="sglang.srt.models.qwen3:Qwen3ForCausalLM", block_size=4, mask_token_id=151669
    ),
}
"""Architectures that are always block diffusion."""

CONVERTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that are block diffusion where their config.json has block_size and mask_token_id."""


def recognise(config: Mapping[str, Any], block_size: int | None = None) -> DiffusionTarget | None:
    """Return the model that a config.json describes; None if it is not a block-diffusion model. block_size: in place of
    the config's. Raises DiffusionConfigError for contradictory fields."""
    architecture = (config.get("architectures") or [""])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        if architecture not in CONVERTED or not {"block_size", "mask_token_id"} <= config.keys():
            return None
        family = Family()
    block = block_size or config.get("block_size") or config.get("bd_size") or family.block_size
    mask = config.get("mask_token_id", family.mask_token_id)
    context = config.get("context_mask", "block")
    vocabulary = config.get("vocab_size", 0)
    if not isinstance(block, int) or not 1 < block <= 256:
        raise DiffusionConfigError(f"block_size is a number from 2 to 256, not {block!r}")
    if not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise DiffusionConfigError(f"mask_token_id is a token below vocab_size ({vocabulary}), not {mask!r}")
    if context not in CONTEXT_MASKS:
        raise DiffusionConfigError(f"context_mask is one of {', '.join(CONTEXT_MASKS)}, not {context!r}")
    return DiffusionTarget(
        block_size=block,
        mask_token_id=mask,
        shift=bool(config.get("shift", family.shift)),
        causal_context=context == "causal",
    )
