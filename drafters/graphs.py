"""Drafting as a CUDA graph: keys, prompt lookup, the model and the choice between them in one launch.

There are graphs for some numbers of requests. A smaller batch runs in the next larger graph; its unused rows read row 0
of the page table, a row with slots that belong to no request. All randomness of a draft is in its keys, which depend on
seeds and positions, so a replay draws with the seeds it is given.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch

from outrider.kernels.noise import draft_keys
from outrider.kernels.ragged import copy_all

from .base import Draft, DraftBatch

BY_REQUEST = {
    "seeds": 0, "seeded": False, "decided": False, "temperatures": 0.0, "top_ks": 1 << 30, "top_ps": 1.0, "min_ps": 0.0,
}  # fmt: skip
"""Fields of `HeldRules`, with their values where a batch has None."""
Propose = Callable[[DraftBatch], Draft]
Record = Callable[[Callable[[], Draft]], tuple[Callable[[], None], Draft]]
"""Captures a call: maps it to a function that replays it, and to the place of its results."""


class HeldRules:
    """Seeds and sampling rules of a batch's requests, in buffers of `most` rows that graphs read. Each request gets all
    rules, set to keep everything where it has none, so one graph serves all. Rows after the batch's last are greedy."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._buffers = {name: torch.full((most,), off, device=device) for name, off in BY_REQUEST.items()}
        self._buffers["decided"].fill_(True)
        self._taken: tuple[torch.Tensor | None, ...] = ()

    def of(self, count: int) -> dict[str, Any]:
        """Return the buffers of `count` rows, by the names of `DraftBatch`."""
        return {name: buffer[:count] for name, buffer in self._buffers.items()}

    def take(self, batch: Any) -> None:
        """Copy the rules and seeds of a `DraftBatch` or `Sampling`, unless the tensors are those of the last call."""
        taken = batch.seeds, batch.seeded, batch.decided, *batch.rules
        if self._taken and all(map(is_, taken, self._taken)):
            return
        self._taken = taken
        for buffer, off, value in zip(self._buffers.values(), BY_REQUEST.values(), taken, strict=True):
            if value is None:
                buffer.fill_(off)
            else:
                buffer[: len(value)].copy_(value)
        self._buffers["temperatures"][len(batch.seeds) :].zero_()


class DraftGraphs:
    """Graphs of `propose`, a drafter's, with shapes that depend only on the number of requests.

    sizes: numbers of requests, ascending. page_table: the engine's. gamma: tokens of a draft.
    room: [most requests, G, V'] float32, to which all graphs write q.
    """

    def __init__(
        self, propose: Propose, sizes: Sequence[int], page_table: torch.Tensor, gamma: int, room: torch.Tensor,
        record: Record | None = None,
    ) -> None:  # fmt: skip
        self.sizes, self.gamma, self._propose = list(sizes), gamma, propose
        most, device = self.sizes[-1], page_table.device
        # The last one stays 0 and pads lengths and rows.
        anchors, seq_lens, rows, answer_lens, self._zeros = torch.zeros((5, most), dtype=torch.int64, device=device)
        self._everyone = torch.ones(most, dtype=torch.bool, device=device)
        self._mask, self._masked, self._rules = self._everyone.clone(), False, HeldRules(most, device)
        self._given = DraftBatch(
            anchors=anchors, seq_lens=seq_lens, rows=rows, page_table=page_table, keys=anchors.new_empty(0, gamma),
            draft_mask=self._mask, answer_lens=answer_lens, probs_room=room, all_greedy=False,
            longest=page_table.shape[1], **self._rules.of(most),
        )  # fmt: skip
        self._answer_lens, make = answer_lens, record or GraphRecorder(device)
        self._graphs = {}
        for size in reversed(self.sizes):  # the largest first: the rest then fit into its memory
            first = replace(
                self._given, anchors=anchors[:size], seq_lens=seq_lens[:size], rows=rows[:size],
                draft_mask=self._mask[:size], answer_lens=answer_lens[:size], **(held := self._rules.of(size)),
            )  # fmt: skip
            self._graphs[size] = make(partial(self._with_keys, first, held["seeds"], held["seeded"]))

    def _with_keys(self, batch: DraftBatch, seeds: torch.Tensor, seeded: torch.Tensor) -> Draft:
        return self._propose(replace(batch, keys=draft_keys(seeds, seeded, batch.seq_lens, self.gamma)))

    def fits(self, requests: int, page_table: torch.Tensor) -> bool:
        return requests <= self.sizes[-1] and page_table is self._given.page_table

    def propose(self, batch: DraftBatch) -> Draft:
        """Return the draft of a batch that fits; the next replay overwrites it. The batch has seeds; its keys are not
        read."""
        count, given = len(batch.anchors), self._given
        size = self.sizes[bisect_left(self.sizes, count)]
        padding = self._zeros[count:size]
        pairs = [
            (given.anchors[:count], batch.anchors), (given.seq_lens[:count], batch.seq_lens),
            (given.rows[:count], batch.rows), (given.seq_lens[count:size], padding), (given.rows[count:size], padding),
        ]  # fmt: skip
        if batch.answer_lens is not None:
            pairs.append((self._answer_lens[:count], batch.answer_lens))
        copy_all(pairs)
        if batch.draft_mask is not None or self._masked:
            mask = self._everyone if batch.draft_mask is None else batch.draft_mask
            self._mask[: len(mask)].copy_(mask)
        self._masked = batch.draft_mask is not None
        self._rules.take(batch)
        replay, made = self._graphs[size]
        replay()
        looked_up, points = (None if each is None else each[:count] for each in (made.looked_up, made.points))
        q = (given.probs_room, made.vocab) if batch.wants_probs else (None, None)
        row = made.tokens[:count], made.lens[:count], made.confidence[:count], *q
        return Draft(*row, looked_up, count, points=points if batch.wants_probs else None)


class GraphRecorder:
    """Captures by CUDA, all graphs in one pool of memory."""

    WARM = 2
    """Runs before a capture, in which kernels are compiled and libraries allocate memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Draft]) -> tuple[Callable[[], None], Draft]:
        beside, now = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        beside.wait_stream(now)
        with torch.cuda.stream(beside):
            for _ in range(self.WARM):
                forward()
        now.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            made = forward()
        return graph.replay, made
