"""The drafter's view of its target, whichever engine has loaded it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels.blocks import BlockRows

Rows = torch.Tensor | BlockRows
"""A matrix [V, d] of which rows are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target.

    config: its Hugging Face (text) config.
    weights: embedding and head, each [V, d] without padding, to be used in place; indexing gives rows as a tensor. A
        function, because not every model keeps them where they are looked for, and most drafters never ask.
    dtype: of its activations. device: where it runs.
    capture_layers: have the engine hand the outputs of these layers to `Drafter.observe` from now on, 0 being the first
        decoder layer; None where the engine cannot.
    """

    config: Any
    weights: Callable[[], tuple[Rows, Rows]]
    dtype: torch.dtype
    device: torch.device | str
    capture_layers: Callable[[list[int]], None] | None = None
