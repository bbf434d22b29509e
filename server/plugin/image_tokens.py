"""Tokens of images in prompts: their ids, and the positions of the tokens after them.

SGLang replaces an image's tokens by numbers made from its content, so that prefixes with different images differ. They
lie outside the vocabulary. An image takes more tokens than positions: tokens of one row differ only by their column
(M-RoPE). So positions of the text after it are lower than its token count by a constant for each request.
"""

from collections.abc import Sequence
from typing import Any

import torch

from outrider.kernels.ragged import FlatVerify


def rotary_positions(flat: FlatVerify, reqs: Sequence[Any]) -> torch.Tensor:
    """Return [B] int64 positions that rotate the tokens of a verify batch. reqs: SGLang's requests."""
    images = [req.multimodal_inputs for req in reqs]
    offsets = [None if image is None else image.mrope_position_delta for image in images]
    if all(offset is None for offset in offsets):
        return flat.positions
    deltas = torch.tensor([0 if offset is None else int(offset) for offset in offsets], device=flat.positions.device)
    return flat.positions + deltas[flat.request]


def within_vocabulary(tokens: torch.Tensor, reqs: Sequence[Any], model_config: Any) -> torch.Tensor:
    """Return the tokens [N] of a prefill batch with the model's own placeholder for each token of an image."""
    if all(req.multimodal_inputs is None for req in reqs):
        return tokens
    return tokens.masked_fill(tokens >= model_config.vocab_size, model_config.image_token_id)
