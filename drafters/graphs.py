"""Drafting as a CUDA graph: keys, prompt lookup, the model and the choice between them in one launch.

There are graphs for some numbers of requests. A smaller batch runs in the next larger graph; its unused rows read row 0
of the page table, a row with slots that belong to no request. All randomness of a draft is in its keys, which depend on
seeds and positions, so a replay draws with the seeds it is given.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from outrider.kernels.noise import draft_keys
from outrider.kernels.ragged import copy_all

from .base import Draft, DraftBatch

NO_TOP_K = 1 << 30
BY_REQUEST = {
    "seeds": 0, "seeded": False, "temperatures": 0.0, "top_ks": NO_TOP_K, "top_ps": 1.0, "min_ps": 0.0,
    "decided": False,
}  # fmt: skip
"""Fields that stay the same while a batch's requests run, with their values where the batch has None: a rule that keeps
everything; q of all requests is read."""
Propose = Callable[[DraftBatch], Draft]
Record = Callable[[Callable[[], Draft]], tuple[Callable[[], None], Draft]]
"""Captures a call: maps it to a function that replays it, and to the place of its results."""


class DraftGraphs:
    """Graphs of `propose`, a drafter's, with shapes that depend only on the number of requests.

    Every request gets all sampling rules, set to keep everything where it has none, so one graph serves all.

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
        fixed: dict[str, Any] = {name: torch.full((most,), value, device=device) for name, value in BY_REQUEST.items()}
        fixed["decided"].fill_(True)
        self._everyone = torch.ones(most, dtype=torch.bool, device=device)
        self._given = DraftBatch(
            anchors=anchors, seq_lens=seq_lens, rows=rows, page_table=page_table, keys=anchors.new_empty(0, gamma),
            draft_mask=self._everyone.clone(), answer_lens=answer_lens, probs_room=room, all_greedy=False,
            longest=page_table.shape[1], **fixed,
        )  # fmt: skip
        self._masked = False
        self._fixed: list[torch.Tensor | None] = []
        make = record or GraphRecorder(device)
        # The largest first: the rest then fit into its memory.
        by_request = ("anchors", "seq_lens", "rows", "draft_mask", "answer_lens", *BY_REQUEST)
        given = {name: getattr(self._given, name) for name in by_request}
        self._graphs = {}
        for size in reversed(self.sizes):
            first = replace(self._given, **{name: value[:size] for name, value in given.items()})
            self._graphs[size] = make(partial(self._with_keys, first))

    def _with_keys(self, batch: DraftBatch) -> Draft:
        assert batch.seeds is not None
        assert batch.seeded is not None
        return self._propose(replace(batch, keys=draft_keys(batch.seeds, batch.seeded, batch.seq_lens, self.gamma)))

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
            assert given.answer_lens is not None
            pairs.append((given.answer_lens[:count], batch.answer_lens))
        copy_all(pairs)
        self._take_rules(batch, count)
        replay, made = self._graphs[size]
        replay()
        draft = Draft(made.tokens[:count], made.lens[:count], made.confidence[:count], drafting=count)
        draft = replace(draft, looked_up=None if made.looked_up is None else made.looked_up[:count])
        if not batch.wants_probs:
            return draft
        points = None if made.points is None else made.points[:count]
        return replace(draft, probs=self._given.probs_room, vocab=made.vocab, points=points)

    def _take_rules(self, batch: DraftBatch, count: int) -> None:
        """Copy the draft mask, and sampling rules and seeds unless they are the previous step's."""
        assert self._given.draft_mask is not None
        if batch.draft_mask is not None:
            self._given.draft_mask[:count].copy_(batch.draft_mask)
        elif self._masked:
            self._given.draft_mask.copy_(self._everyone)
        self._masked = batch.draft_mask is not None
        fixed = [getattr(batch, name) for name in BY_REQUEST]
        if len(fixed) == len(self._fixed) and all(ours is its for ours, its in zip(self._fixed, fixed, strict=True)):
            return
        self._fixed = fixed
        for (name, off), value in zip(BY_REQUEST.items(), fixed, strict=True):
            buffer = getattr(self._given, name)[:count]
            if value is None:
                buffer.fill_(off)
            else:
                buffer.copy_(value)


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
