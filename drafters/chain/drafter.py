"""Drafters of one layer as a `Drafter`: a chain of tokens, each drafted by one pass of that layer.

A row pairs token t_j with the features of position j - 1. It lies at the KV slot of t_j, and so do the features of
position j. Both depend on the tokens up to t_j alone, so a request that continues a shared prefix finds its rows
(`encoding.py`). Rows of drafted tokens are written without the target's features, and again once they are committed.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..base import Draft, DraftBatch, Features, Rows
from ..block.sampling import all_requests_greedy, draw_columns
from ..confidence import own_confidence
from ..config_file import CheckpointError
from ..encoding import EncodingDrafter
from ..spans import Spans
from .network import ChainNetwork, ChainWeights

Drawn = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Tokens [R, gamma], probs [R, gamma, V'] (None: all greedy or not wanted) and confidence [R, gamma]."""
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Tensors taken from the target where a drafter has none."""


class ChainDrafter(EncodingDrafter):
    """Drafts token by token; on a CPU no deeper than `DraftBatch.depth`.

    read: reads the weights of another folder, or raises CheckpointError. network_type: class of the network.
    embedding, head: [V, d] of the target, used where the checkpoint has none.
    positions: least length of the rotary table.
    compiled: computes a chain in one call (`eagle/compiled.py`); None: the chain takes a call per token.
    """

    block = 1
    assesses_itself = True
    network_type: type[Any]
    network: ChainNetwork
    compiled: Any

    def __init__(
        self, weights: ChainWeights, *, read: Callable[[str], ChainWeights], embedding: Rows, head: Rows, gamma: int,
        positions: int = 0,
    ) -> None:  # fmt: skip
        self.gamma, self.target_layers = gamma, weights.layers
        self._read, self._target_rows = read, (embedding, head)
        self._positions = max(positions, weights.config.max_positions)
        self._use(weights)
        self.dtype, self.device = self.network.dtype, self.network.device
        self.on_host = self.shortens = self.device.type == "cpu"

    def _compile(self) -> Any:
        """Return `compiled` for the network in use."""
        return None

    def _use(self, weights: ChainWeights) -> None:
        self.vocab = weights.vocab
        self.embedding, head = with_shared(weights, *self._target_rows)
        self.network = self.network_type(weights, head, self._positions)
        self.compiled = self._compile()

    @torch.inference_mode()
    def reload(self, checkpoint: str, number: int = 0) -> None:
        if number:
            return super().reload(checkpoint, number)
        weights, before = self._read(checkpoint), self.network
        if replace(weights.config, gamma=before.config.gamma) != before.config:
            raise CheckpointError(f"the drafter {checkpoint} has another shape than the one that serves")
        self._use(weights)
        self.network.keys, self.network.values = before.keys, before.values
        if self.compiled is not None and len(before.keys):
            self.compiled.allocate(self.features)

    def allocate(self, slots: int) -> None:
        super().allocate(slots)
        self.network.allocate(slots)
        self.features = torch.zeros(slots, self.network.config.hidden_size, dtype=self.dtype, device=self.device)
        if self.compiled is not None:
            self.compiled.allocate(self.features)

    def slot_state(self) -> list[torch.Tensor]:
        return [*super().slot_state(), self.network.keys, self.network.values, self.features]

    @torch.inference_mode()
    def observe(self, features: Features) -> None:
        if features.hidden is None:
            raise ValueError(f"{type(self).__name__} needs the target's hidden states")
        super().observe(features)
        self.features[features.slots] = self.network.fuse(features.hidden)
        self.encoded[features.slots] = features.positions == 0  # position 0 has no row

    def _encode(self, new: Spans) -> None:
        place = torch.arange(len(new.slots), device=self.device)
        request = torch.searchsorted(new.batch.qo_indptr[1:].long(), place, right=True)
        rows = new.batch.rows[request.clamp(max=len(new.batch.rows) - 1)]  # after the last request: padding
        before = new.batch.page_table[rows, (new.positions - 1).clamp(min=0)].long()
        self.network.write(self._inputs(new), self.features[before], new)
        self.encoded.index_fill_(0, new.slots, True)

    def _draft(self, batch: DraftBatch, block: Spans, new: Spans | None) -> Draft:
        if new is not None:
            self._encode(new)
        gamma = self.gamma if batch.depth is None or not self.shortens else min(batch.depth, self.gamma)
        compiled = self.compiled
        chain: Drawn = compiled.propose(batch, gamma) if compiled else self._chain(batch, block, gamma)
        return Draft.of(*chain, self.vocab).widened(self.gamma)

    def _chain(self, batch: DraftBatch, block: Spans, gamma: int) -> Drawn:
        all_greedy = all_requests_greedy(batch.rules, batch.all_greedy)
        wants_probs = batch.wants_probs and not all_greedy
        before = batch.page_table[batch.rows, batch.seq_lens - 1].long()
        token, features = batch.anchors, self.features[before]
        tokens, probs, sure = [], [], []
        for k in range(gamma):
            if k:
                block = self._behind(batch, k)
            logits, features = self.network.step(self._embed(token), features, block)
            column, q = draw_columns(logits.float(), batch.rules, batch.keys[:, k].contiguous(), self.vocab, all_greedy)
            token = column if self.vocab is None else self.vocab[column]
            tokens.append(token)
            sure.append(own_confidence(q, batch.temperatures))
            if wants_probs:
                probs.append(q)
        return torch.stack(tokens, 1), torch.stack(probs, 1) if wants_probs else None, torch.stack(sure, 1)

    def _behind(self, batch: DraftBatch, k: int) -> Spans:
        """Return spans of one position per request, that of its k-th drafted token."""
        starts = batch.seq_lens + k
        if self.on_host:
            return Spans.of(batch.page_table, batch.rows, starts, torch.ones_like(starts))
        longest = int(starts.max()) if batch.longest is None else batch.longest + k
        return Spans.blocks(batch.page_table, batch.rows, starts, 1, longest)


def with_shared(weights: ChainWeights, embedding: Rows, head: Rows) -> tuple[Rows, torch.Tensor]:
    """Return embedding [V, d] and head [V', d] of a drafter: its own, or rows of the target's [V, d]."""
    own_embedding, head_rows = (weights.get(name) for name in SHARED)
    embedding = embedding if own_embedding is None else own_embedding
    if head_rows is None:
        rows = embedding if weights.config.tied else head
        every = torch.arange(weights.config.vocab_size, device=rows.device)
        head_rows = rows[every if weights.vocab is None else weights.vocab.to(rows.device)]
    return embedding, head_rows
