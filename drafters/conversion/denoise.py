"""Static low-confidence unmasking in plain torch: what training measures by, and a reference for the server's.

Each step predicts every masked position and reveals the `per_step` of largest top probability, the first among equals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..training.batches import Tile
from ..training.forward import FrozenTarget
from .blocks import Pack
from .model import Cache, ConvertedModel


def reveal(logits: torch.Tensor, masked: torch.Tensor, per_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns chosen [A, B] int64 by the logits [A, B, V'], and which masked positions [A, B] bool are revealed."""
    chosen = logits.argmax(-1)
    top = logits.amax(-1).float() - logits.float().logsumexp(-1)
    order = top.masked_fill(~masked, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    picked = torch.zeros_like(masked).scatter_(1, order[:, :per_step], True)
    return chosen, picked & masked


def denoise(
    model: ConvertedModel, frozen: FrozenTarget, first: torch.Tensor, ids: torch.Tensor, masked: torch.Tensor,
    per_step: int, read: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Blocks [A, B] with every mask replaced.

    first: [A, d] states of the finished rows before the blocks (read with a shift alone); ids, masked: [A, B];
    read: inputs [A, B, d] -> states [A, B, d] of the open blocks.
    """
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
    """Tokens of whole answer blocks that come out as in the answer, behind its own tokens; and their number."""
    hidden, cache = model.read_finished(frozen.embedding[pack.ids], pack.spans)
    whole = pack.whole[:, None].expand_as(pack.block_ids)
    ids = denoise(
        model, frozen, hidden[pack.before], pack.block_ids, whole, per_step,
        partial(model.read_open, starts=pack.starts, cache=cache, tiles=pack.tiles),
    )  # fmt: skip
    return int((ids == pack.block_ids)[whole].sum()), int(whole.sum())


@torch.inference_mode()
def generate(
    model: ConvertedModel, frozen: FrozenTarget, prompt: list[int], *, tokens: int, stops: set[int], per_step: int = 1
) -> list[int]:
    """The model's own continuation at temperature 0, at most so many tokens, its stop token included."""
    layout, device = model.layout, frozen.embedding.device
    size = layout.block_size
    ids = torch.tensor(prompt, device=device)
    done, cache, last = 0, None, None
    while len(ids) < len(prompt) + tokens:
        start = len(ids) // size * size
        if start > done:  # what is finished since, and at first the prompt's whole blocks
            last, cache = _extend(model, frozen, ids[done:start], cache)
            done = start
        block = torch.full((1, size), 0, device=device)
        block[0, : len(ids) - start] = ids[start:]
        masked = torch.arange(size, device=device)[None] >= len(ids) - start
        first = last[-1:] if last is not None else model.mask[None]
        seen = cache or _nothing(model)
        tile = [Tile(0, 1, 0, start, torch.zeros(1, start, dtype=torch.bool, device=device))]
        where = torch.tensor([start], device=device)
        read = partial(model.read_open, starts=where, cache=seen, tiles=tile)
        filled = denoise(model, frozen, first, block, masked, per_step, read)
        new = filled[0, len(ids) - start :].tolist()
        ids = torch.cat([ids[:start], filled[0]])
        ended = [i for i, token in enumerate(new) if token in stops]
        if ended:
            ids = ids[: len(ids) - len(new) + ended[0] + 1]
            break
    return ids[len(prompt) : len(prompt) + tokens].tolist()


def _extend(
    model: ConvertedModel, frozen: FrozenTarget, ids: torch.Tensor, past: Cache | None
) -> tuple[torch.Tensor, Cache]:
    return model.read_finished(frozen.embedding[ids], [(0, len(ids))], past)


def _nothing(model: ConvertedModel) -> Cache:
    empty = model.mask.new_zeros(0, model.config.num_kv_heads, model.config.head_dim)
    return [(empty, empty)] * model.config.num_layers
