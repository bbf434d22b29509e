"""DEER and SpecDiff as a `Drafter`: a diffusion drafter of one denoising step, or of several.

Both are one network, a small language model over the tokens, which takes only embedding and head from the target. Keys
and values lie at the target's KV slots; new tokens of a text are encoded in the same products as its block
(`encoding.py`).
"""

from pathlib import Path
from typing import Any, Self

import torch

from outrider.kernels.attention import flat_attention

from ..base import Draft, DraftBatch, Rows, Target
from ..block.checkpoint import check_shapes, check_target, load_as, target_identity
from ..block.compiled import Pools
from ..config_file import CheckpointError
from ..encoding import EncodingDrafter
from ..spans import Spans
from .compiled import compile_diffusion
from .denoise import denoise, make_schedule
from .model import DiffusionModel


class DiffusionDrafter(EncodingDrafter):
    """Drafts a block in `denoising_steps` forward passes.

    embedding, head: [V, d] of the target, used in place; only the head's rows of the draft vocabulary are copied.
    gamma: tokens per block, at most the number that the model was trained for, which is the default.
    """

    def __init__(
        self, model: DiffusionModel, *, embedding: Rows, head: Rows, gamma: int | None = None, denoising_steps: int = 1
    ) -> None:
        config = model.config
        check_shapes(config, embedding, head, gamma)
        self.gamma = self.block = gamma or config.gamma
        self.assesses_itself = not config.confidence_head
        self.schedule = make_schedule(self.gamma, denoising_steps)
        self.dtype, self.device = model.norm.weight.dtype, model.norm.weight.device
        self.on_host = model.norm.weight.is_cpu
        self.embedding, self._target_head = embedding, head
        self.pools: Pools = []
        self._use(model)

    def _use(self, model: DiffusionModel) -> None:
        self.model = model.requires_grad_(False).eval()
        self.vocab = model.vocab if model.config.draft_vocab_size else None
        self.head = self._target_head[model.vocab.to(self._target_head.device)].to(self.dtype)
        self.compiled = compile_diffusion(self.model, self.head)
        if self.compiled is not None and self.pools:
            self.compiled.allocate(self.pools)

    @classmethod
    def load(cls, target: Target, checkpoint: str | Path, **options: Any) -> Self:
        """Load a checkpoint folder for a target; raises CheckpointError where it does not fit. options: the remaining
        arguments of the class."""
        embedding, head = target.weights()
        model = load_as(DiffusionModel, checkpoint, dtype=target.dtype, device=embedding.device)
        check_target(model.config, target_identity(target.config, embedding))
        return cls(model, embedding=embedding, head=head, **options)

    def allocate(self, slots: int) -> None:
        super().allocate(slots)
        config, like = self.model.config, self.model.norm.weight
        shape = slots, config.num_kv_heads, config.head_dim
        self.pools = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.num_layers)]
        if self.compiled is not None:
            self.compiled.allocate(self.pools)

    def slot_state(self) -> list[torch.Tensor]:
        return [*super().slot_state(), *(pool for pair in self.pools for pool in pair)]

    @torch.inference_mode()
    def reload(self, checkpoint: str, number: int = 0) -> None:
        if number:
            return super().reload(checkpoint, number)
        model = load_as(DiffusionModel, checkpoint, dtype=self.dtype, device=self.device)
        if model.config != self.model.config:
            raise CheckpointError(f"the drafter {checkpoint} has another shape than the one that serves")
        self._use(model)

    def _encode(self, new: Spans) -> None:
        self._pass(self._inputs(new), new, None, slice(0, 0))

    def _draft(self, batch: DraftBatch, block: Spans, new: Spans | None) -> Draft:
        requests, size = len(batch.rows), self.gamma

        def predict(
            tokens: torch.Tensor, revealed: torch.Tensor, columns: slice
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            nonlocal new
            ids = torch.cat([batch.anchors[:, None], tokens[:, :-1]], 1)
            inputs = self._embed(ids.flatten()).view(requests, size, -1)
            inputs = self.model.block_inputs(inputs, revealed[:, :-1]).flatten(0, 1)
            if new is not None:
                inputs = torch.cat([self._inputs(new), inputs])
            hidden, logits = self._pass(inputs, new, block, columns)
            new = None
            sure = self.model.confidence_head
            chances = None if sure is None else torch.sigmoid(sure(hidden, hidden).float()).view(requests, -1)
            return logits.view(requests, columns.stop - columns.start, -1), chances

        made = denoise(
            predict, self.schedule, batch.rules, batch.keys[:, :size], vocab=self.vocab, wants_probs=batch.wants_probs,
            all_greedy=batch.all_greedy,
        )  # fmt: skip
        return Draft.of(*made, self.vocab)

    def _pass(
        self, x: torch.Tensor, new: Spans | None, block: Spans | None, columns: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states [R * M, d] and logits [R * M, V'] of the M `columns` of each block.

        x: [N, d] inputs, rows of new context, which this encodes, then rows of the blocks. Keys and values of both are
            stored at their slots.
        """
        spans = [span for span in (new, block) if span is not None]
        positions, slots = (
            (spans[0].positions, spans[0].slots)
            if len(spans) == 1
            else (torch.cat([s.positions for s in spans]), torch.cat([s.slots for s in spans]))
        )
        positions = positions.clamp(max=self.model.config.max_positions - 1)  # rows after an answer's end may be beyond
        if self.compiled is not None:
            results = self.compiled.forward(x, positions, slots, new, block, columns)
        else:
            results = self._plain_pass(x, positions, slots, spans, new, columns)
        if new is not None:
            self.encoded.index_fill_(0, new.slots, True)
        return results

    def _plain_pass(
        self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, spans: list[Spans], new: Spans | None,
        columns: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return the same in plain torch."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.pools[layer]
            keys[slots], values[slots] = k, v
            rows = q.split([len(span.slots) for span in spans])
            scale = self.model.config.head_dim**-0.5
            return torch.cat(
                [
                    flat_attention(part, keys, values, span.batch, scale=scale, causal=span is new)
                    for part, span in zip(rows, spans, strict=True)
                ]
            )

        hidden = self.model(x, positions, attend)[0 if new is None else len(new.slots) :]
        hidden = hidden.unflatten(0, (len(hidden) // self.gamma, self.gamma))[:, columns].flatten(0, 1)
        return hidden, hidden @ self.head.T
