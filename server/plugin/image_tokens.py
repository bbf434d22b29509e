"""Tokens of images in prompts: what they are called, and the positions of what stands behind them.

SGLang puts numbers made of an image's content in the place of its tokens, so that prefixes with another image are
others. They lie outside the vocabulary. An image takes more tokens than positions: those of one row differ by their
column alone (M-RoPE). Texts behind it are rotated by positions that fall short of the number of tokens by one
constant for each request.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .spec_inputs import FlatVerify


def rotary_positions(flat: FlatVerify, reqs: Sequence[Any]) -> torch.Tensor:
    """[B] int64 positions that the tokens of a verify batch are rotated by. reqs: SGLang's requests."""
    images = [req.multimodal_inputs for req in reqs]
    found = [None if one is None else one.mrope_position_delta for one in images]
    if all(one is None for one in found):
        return flat.positions
    deltas = torch.tensor([0 if one is None else int(one) for one in found], device=flat.positions.device)
    return flat.positions + deltas[flat.request]


def within_vocabulary(tokens: torch.Tensor, reqs: Sequence[Any], model_config: Any) -> torch.Tensor:
    """The tokens [N] of a prefill batch with the model's own placeholder for each token of an image."""
    if all(req.multimodal_inputs is None for req in reqs):
        return tokens
    return tokens.masked_fill(tokens >= model_config.vocab_size, model_config.image_token_id)
