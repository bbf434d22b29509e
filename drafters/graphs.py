"""Drafting a block as a CUDA graph: one launch in place of more than a hundred.

There are graphs for some numbers of requests. A smaller batch runs in the next larger graph; its unused rows read row 0
of the page table, a row with slots that belong to no request. All randomness of a draft is in its keys, so a replay
draws with the keys it is given.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from outrider.kernels.ragged import copy_all

from ..base import DraftBatch

Block = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Tokens, probs and confidence of `Draft`."""
BY_REQUEST = "temperatures", "top_ks", "top_ps", "min_ps", "decided"
"""Fields of a batch that stay the same while its requests run."""
NO_TOP_K = 1 << 30
OFF = {"top_ks": NO_TOP_K, "top_ps": 1.0, "min_ps": 0.0, "decided": False}
"""Values for fields that a batch leaves out: rules that keep everything, and q of all requests."""
Record = Callable[[Callable[[], Block]], tuple[Callable[[], None], Block]]
"""Captures a call: maps it to a function that replays it, and to the place of its results."""


class DraftGraphs:
    """Graphs of `propose`, with shapes that depend only on the number of requests.

    Every request gets all sampling rules, set to keep everything where it has none, so that one graph serves all.

    lens: [most requests] int64, of whole drafts.

    sizes: numbers of requests, ascending. page_table: the engine's. gamma: of the keys.
    room: [most requests, G, V'] float32, where all graphs leave q of requests that read it.
    """

    def __init__(
        self,
        propose: Callable[[DraftBatch], Block],
        sizes: Sequence[int],
        page_table: torch.Tensor,
        gamma: int,
        room: torch.Tensor,
        record: Record | None = None,
    ) -> None:
        self.sizes = list(sizes)
        most, device = self.sizes[-1], page_table.device
        numbers = torch.zeros((3, most), dtype=torch.int64, device=device)
        self._given = DraftBatch(
            anchors=numbers[0],
            seq_lens=numbers[1],
            rows=numbers[2],
            page_table=page_table,
            temperatures=torch.zeros(most, device=device),
            keys=torch.zeros((most, gamma), dtype=torch.int64, device=device),
            top_ks=torch.full((most,), NO_TOP_K, device=device),
            top_ps=torch.ones(most, device=device),
            min_ps=torch.zeros(most, device=device),
            decided=torch.ones(most, dtype=torch.bool, device=device),
            probs_room=room,
            all_greedy=False,
            longest=page_table.shape[1],
        )
        self.lens = torch.full((most,), gamma, device=device)
        self._zeros = torch.zeros(most, dtype=torch.int64, device=device)
        self._rules: list[torch.Tensor | None] = []
        make = record or GraphRecorder(device)
        # The largest first: the rest then fit into its memory.
        given = {name: getattr(self._given, name) for name in ("anchors", "seq_lens", "rows", "keys", *BY_REQUEST)}
        self._graphs = {}
        for size in reversed(self.sizes):
            first = replace(self._given, **{name: value[:size] for name, value in given.items()})
            self._graphs[size] = make(partial(propose, first))

    def fits(self, batch: DraftBatch) -> bool:
        return len(batch.anchors) <= self.sizes[-1] and batch.page_table is self._given.page_table

    def propose(self, batch: DraftBatch) -> Block:
        """Return the draft of a batch that fits, as `propose` gives it; the next replay overwrites it."""
        count, given = len(batch.anchors), self._given
        size = self.sizes[bisect_left(self.sizes, count)]
        keys, padding = batch.keys[:, : given.keys.shape[1]].contiguous(), self._zeros[count:size]
        parts = (given.anchors, batch.anchors), (given.seq_lens, batch.seq_lens), (given.rows, batch.rows)
        pairs = [*((buffer[:count], value) for buffer, value in parts), (given.keys[:count], keys)]
        pairs += [(buffer[count:size], padding) for buffer in (given.seq_lens, given.rows)]
        copy_all(pairs)
        self._take_rules(batch)
        replay, (tokens, _, confidence) = self._graphs[size]
        replay()
        probs = given.probs_room if batch.wants_probs else None
        return tokens[:count], probs, confidence[:count]

    def _take_rules(self, batch: DraftBatch) -> None:
        """Copy the sampling rules, unless they are the same tensors as in the step before."""
        rules = [getattr(batch, name) for name in BY_REQUEST]
        if len(rules) == len(self._rules) and all(map(operator.is_, rules, self._rules)):
            return
        self._rules = rules
        for name, value in zip(BY_REQUEST, rules, strict=True):
            buffer = getattr(self._given, name)[: len(batch.anchors)]
            if value is None:
                buffer.fill_(OFF[name])
            else:
                buffer.copy_(value)


class GraphRecorder:
    """Captures by CUDA, all graphs in one pool of memory."""

    WARM = 2
    """Runs before a capture, in which kernels are compiled and libraries allocate memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Block]) -> tuple[Callable[[], None], Block]:
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
