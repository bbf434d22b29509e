"""Static low-confidence unmasking in plain torch, for validation. Each step predicts every masked position and reveals
the `per_step` of largest top probability, the first among equals."""

from collections.abc import Callable
from functools import partial

import torch

from ..training.forward import FrozenTarget
from .blocks import Pack
from .model import ConvertedModel


def reveal(logits: torch.Tensor, masked: torch.Tensor, per_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns [A, B] int64 chosen by logits [A, B, V'], and [A, B] bool the masked positions to reveal."""
    chosen = logits.argmax(-1)
    top = logits.amax(-1).float() - logits.float().logsumexp(-1)
    order = top.masked_fill(~masked, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    picked = torch.zeros_like(masked).scatter_(1, order[:, :per_step], True)
    return chosen, picked & masked


def denoise(
    model: ConvertedModel, frozen: FrozenTarget, first: torch.Tensor, ids: torch.Tensor, masked: torch.Tensor,
    per_step: int, read: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Return blocks [A, B] with every mask replaced. first: [A, d] states of the finished rows before the blocks (only
    read with a shift). ids, masked: [A, B]. read: maps inputs [A, B, d] of the open blocks to states [A, B, d]."""
    ids, masked = ids.clone(), masked.clone()
    while bool(masked.any()):
        states = read(model.inputs(frozen.embedding, ids, masked))
        if model.layout.shift:
            states = torch.cat([first[:, None], states[:, :-1]], 1)
        columns, picked = reveal(states @ frozen.head.T, masked, per_step)
        ids = torch.where(picked, model.vocab[columns], ids)
        masked &= ~picked
    return ids


@torch.inference_mode()
def agreement(model: ConvertedModel, frozen: FrozenTarget, pack: Pack, per_step: int) -> tuple[int, int]:
    """Decode whole answer blocks, each after the answer's own tokens; count the tokens that equal the answer's, and
    all."""
    hidden, cache = model.read_finished(frozen.embedding[pack.ids], pack.spans)
    whole = pack.whole[:, None].expand_as(pack.block_ids)
    ids = denoise(
        model, frozen, hidden[pack.before], pack.block_ids, whole, per_step,
        partial(model.read_open, starts=pack.starts, cache=cache, tiles=pack.tiles),
    )  # fmt: skip
    return int((ids == pack.block_ids)[whole].sum()), int(whole.sum())
