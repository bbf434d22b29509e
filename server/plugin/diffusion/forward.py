"""The target's forward over blocks of many states: rows of one flattened batch, several of which may share a prefix.

No row needs its own mask. Every block is a request of the attention's batch; its queries see all of its own positions
and, through the page table, all positions before. So a prompt's blocks, the open block, and its drafts, which have
their own slots, share one batch. Where the context is causal, each token of a final block is such a request. If most
blocks are final, a request's final blocks form one causal request instead, and each token of an open block is one.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels.flat_batch import FlatBatch

from ..flat_attention import FlatAttentionBackend
from .target import DiffusionTarget

PADDING_SLOT = 0
"""SGLang's pools reserve it for keys and values that are never read."""
CHANGES = ("do_tensor_parallel_all_gather", "logit_scale", "final_logit_softcapping")
"""Attributes with which a processor of SGLang's changes logits."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenRows:
    """N blocks of B tokens. A request's blocks are in the order of their positions, drafts of its open block last.

    tokens: [N, B] int64, the states. starts: [N] int64, the position of each block's first token, a multiple of B.
    before: [N] int64, the token before it; meaningless at position 0.
    tables: [N] int64, the request's row of the page table, which has the slots of all positions before the block.
    slots: [N, B] int64, where the block's keys and values go.
    open: [N] bool, the block is being unmasked; False: its tokens are final, and so are its keys and values.
    above: [N] int64, the row with the preceding block, if its slots are not in the page table; -1: they are.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    before: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
    open: torch.Tensor
    above: torch.Tensor

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True, eq=False)
class FlatRows:
    """Tokens, positions and slots [T] of a forward, its batch, and the token that predicts each position.

    causal: as in `flat_attention`.
    says: [N, B] int64, that token by row and place in the block; -1: none, at position 0 under a shift.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    batch: FlatBatch
    causal: bool
    says: torch.Tensor


def flatten(rows: OpenRows, target: DiffusionTarget, page_table: torch.Tensor) -> FlatRows:
    """Lay rows out for a forward.

    page_table: [requests, context] int32. Under a shift, the token before a position gives its distribution. Before a
        block that is the last token of the final block in the batch; without one, that token is computed again.
    """
    count, block = rows.tokens.shape
    places, final = torch.arange(block), ~rows.open
    positions = rows.starts[:, None] + places
    causal = target.causal_context and int(final.sum()) > int(rows.open.sum())
    alone = torch.zeros_like(final) if not target.causal_context else rows.open if causal else final
    # A request of the batch begins at every block's first token, and at every token of a block split into single
    # tokens.
    begins = alone[:, None] | (places == 0)
    if causal:
        begins[:, 0] &= ~_continues(rows)
    reach = torch.where((alone & final)[:, None], positions + 1, rows.starts[:, None] + block).flatten()
    first = begins.flatten().nonzero()[:, 0]
    lengths = torch.cat([first[1:], first.new_tensor([count * block])]) - first
    sees, owner = reach[first + lengths - 1], first // block
    tokens, slots = rows.tokens.flatten(), rows.slots.flatten()
    positions = positions.flatten()
    says = torch.arange(count * block).view(count, block)
    if target.shift:
        says, anchors = _shifted(rows, says)
        tokens = torch.cat([tokens, rows.before[anchors]])
        positions = torch.cat([positions, rows.starts[anchors] - 1])
        slots = torch.cat([slots, torch.full_like(anchors, PADDING_SLOT)])
        sees = torch.cat([sees, rows.starts[anchors]])
        lengths = torch.cat([lengths, torch.ones_like(anchors)])
        owner = torch.cat([owner, anchors])
    table, table_rows = _page_table(rows, page_table, owner)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    return FlatRows(tokens, positions, slots, FlatBatch(indptr, sees.int(), table_rows, table), causal, says)


def _continues(rows: OpenRows) -> torch.Tensor:
    """Return [N] bool, final blocks that follow the final one before them in the batch."""
    before = rows.starts.roll(1) + rows.tokens.shape[1]
    continues = ~rows.open & ~rows.open.roll(1) & (rows.tables == rows.tables.roll(1)) & (rows.starts == before)
    continues[0] = False
    return continues


def _shifted(rows: OpenRows, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `FlatRows.says` under a shift, and the rows [A] that need their preceding token appended to the batch."""
    count, block = rows.tokens.shape
    says = own.roll(1).view(count, block).clone()
    known: dict[tuple[int, int], int] = {}
    anchors: list[int] = []
    requests, starts, is_open = rows.tables.tolist(), rows.starts.tolist(), rows.open.tolist()
    for row in range(count):
        if not is_open[row]:
            known[requests[row], starts[row] + block] = row * block + block - 1
        elif starts[row] == 0:
            says[row, 0] = -1
        else:
            key = requests[row], starts[row]
            if key not in known:
                known[key] = count * block + len(anchors)
                anchors.append(row)
            says[row, 0] = known[key]
    return says, torch.tensor(anchors, dtype=torch.int64)


def _page_table(rows: OpenRows, page_table: torch.Tensor, owner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a page table in which every row has its own slots, and the row there of each owner [M]."""
    positions = rows.starts[:, None] + torch.arange(rows.tokens.shape[1])
    slots = page_table[rows.tables[:, None], positions]
    if torch.equal(slots.long(), rows.slots):
        return page_table, rows.tables[owner]
    copies = page_table[rows.tables, : int(positions.max()) + 1]
    copies.scatter_(1, positions, rows.slots.to(copies.dtype))
    below = (rows.above >= 0).nonzero()[:, 0]
    copies[below[:, None], positions[below] - rows.tokens.shape[1]] = rows.slots[rows.above[below]].to(copies.dtype)
    return copies, owner


class BlockForward:
    """Runs SGLang's model over such rows, on a CPU. runner: SGLang's model runner. The rows of a forward depend on each
    other only through keys and values."""

    def __init__(self, runner: Any, target: DiffusionTarget) -> None:
        self.model, self.target = runner.model, target
        self.backend: FlatAttentionBackend = runner.attn_backend
        self.processor, self.head = self.model.logits_processor, self.model.lm_head
        self._as_they_are = not any(getattr(self.processor, name, None) for name in CHANGES)

    def run(self, rows: OpenRows, wanted: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """Return logits [M, V] of the `wanted` places, [N, B] bool, in their order; keys and values are written.
        forward_batch: SGLang's, of the requests of the rows."""
        from sglang.srt.layers.logits_processor import LogitsMetadata
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        flat = flatten(rows, self.target, self.backend.page_table)
        batch = copy.copy(forward_batch)
        batch.input_ids, batch.positions, batch.out_cache_loc = flat.tokens, flat.positions, flat.slots
        batch.global_num_token_non_padded_cpu = len(flat.tokens)  # SGLang takes later rows for padding
        self.backend.use(flat.batch, causal=flat.causal)
        with forward_context(ForwardContext(attn_backend=self.backend)):
            hidden = self.model.model(flat.tokens, flat.positions, batch)
            hidden = hidden[flat.says[wanted]]
            if self._as_they_are:  # SGLang would copy them into float32
                return self.processor._compute_lm_head(hidden, self.head)[:, : self.processor.vocab_size]
            return self.processor._get_logits(hidden, self.head, LogitsMetadata.from_forward_batch(batch))
