"""Spiffy (arXiv 2509.18085): likely next states of open blocks join them in the same forward.

Base decoding steps every open block once a round. Here its drafts are stepped as well, by the same policy. While a
block's next state is one of its drafts, it moves on to that draft's next state. So it passes through the same states in
fewer rounds. Drafts are rows of the round's flattened batch that share the page table of their prefix. Their pages are
taken and given back within the round, except the page of a final block, which replaces the open one's.
"""

import time
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from ..decode import live
from ..loading.from_profile import load_graphs, load_round_cost
from .algorithm import BlockDiffusion, StepOutcome
from .drafting import Round, ServedRequest, StateDrafting
from .drafts import BlockOutcome, StateDraft, found, with_drafts
from .forward import OpenRows
from .metrics import DiffusionMetrics
from .recording import RoundRecording

IDLE_SECONDS = 0.02
"""Shortest pause between two rounds in which the server counts as idle."""


class Spiffy(BlockDiffusion):
    """Block diffusion with drafts."""

    drafting: StateDrafting

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reload_profile()
        self.forget_records()
        self.states = DiffusionMetrics()
        self._ended = 0.0  # end of the last round, on the host's clock

    def reload_profile(self) -> None:
        """Draft and plan by the profile on disk."""
        self.drafting = StateDrafting(load_graphs(self.config), load_round_cost(self.config), self.mask_id)

    def forget_records(self) -> None:
        self.recording = RoundRecording(self.mask_id)

    def outrider_state(self) -> dict[str, Any]:
        """Return the records since `forget_records`, for another process."""
        return self.recording.to_json()

    def outrider_live(self) -> dict[str, Any]:
        """Return counts for the page."""
        totals = self.states.totals
        drafted, accepted = totals["drafted"], totals["accepted"]
        return live.snapshot(self.metrics, None) | {
            "steps": totals["forwards"],
            "request_steps": totals["request_forwards"],
            "tokens": totals["tokens"],
            "drafted": drafted,
            "verified": drafted,
            "accepted": accepted,
            "wasted": drafted - accepted,
            "diffusion": dict(totals),
            "failures": self.optional.counts.copy(),
        }

    def flush(self) -> None:
        self.optional.run("metrics", None, self.states.flush)
        self.optional.run("metrics", None, self.metrics.flush)

    def generate(self, runner: Any, forward_batch: Any, batch: Any) -> list[StepOutcome]:
        began, run = time.perf_counter(), self.optional.run
        lengths = [length // self.block_size for length in forward_batch.extend_seq_lens_cpu]
        current = self._round(runner, forward_batch, batch.reqs, lengths)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        with self.drafting.deciding_time:
            chosen = run("drafting", None, self.drafting.choose, current)
            drafts = self.drafting.nothing() if chosen is None else chosen
            slots = self._slots(sum(draft.rows for draft in drafts), batch)
            if slots is None:
                drafts, slots = self.drafting.nothing(), current.rows.slots[:0]
            rows = with_drafts(current.rows, current.roots, drafts, slots, self.mask_id)
            if drafts:
                more = torch.tensor([draft.request for draft in drafts for _ in range(draft.rows)])
                owner = torch.cat([owner, more])
        masked = (rows.tokens == self.mask_id) & rows.open[:, None]
        logits = self.forward(runner).run(rows, masked, forward_batch)
        step = self.step(rows, masked, logits, owner, (current.rules, current.seeds))
        stepped = step.states.numpy()
        with self.drafting.deciding_time:
            blocks = found(rows, stepped, current.roots, drafts, len(current.rows), self.mask_id)
            self._give_back(rows, current.roots, slots, blocks, batch)
            run("drafting", None, self.drafting.remember, current, rows, masked, logits, step, blocks)
            run("drafting", None, self.drafting.learn, current, stepped, blocks)
        run("metrics", None, self._record, current, blocks)
        ends = current.rows.starts[np.cumsum(lengths) - 1].tolist()
        outcomes = [
            StepOutcome(start + self.block_size) if block is None else self._outcome(start, block)
            for start, block in zip(ends, blocks, strict=True)
        ]
        run("metrics", None, self._count, current, drafts, blocks, outcomes)
        run("planning", None, self._time, began, len(rows), current, alone=max(lengths) <= 2)
        return outcomes

    # -- before the forward ---------------------------------------------------------------------------------------

    def _round(self, runner: Any, forward_batch: Any, reqs: Any, lengths: list[int]) -> Round:
        """Return the round of a batch; lengths: [R] blocks of each request."""
        rows = self.rows(forward_batch, reqs)
        rules, seeds = self.sampling(forward_batch, reqs)
        last = (np.cumsum(lengths) - 1).tolist()
        return Round(
            rows=rows,
            roots=[row if is_open else -1 for row, is_open in zip(last, rows.open[last].tolist(), strict=True)],
            reqs=reqs,
            served=[ServedRequest.of(req, self.config.planner) for req in reqs],
            rules=rules,
            seeds=seeds,
            context=float(sum(forward_batch.extend_prefix_lens_cpu)),
            longest=runner.req_to_token_pool.req_to_token.shape[1],
        )

    def _slots(self, rows: int, batch: Any) -> torch.Tensor | None:
        """Return [rows, B] int64 slots for drafts; None where there is no room."""
        if not rows:
            return torch.empty((0, self.block_size), dtype=torch.int64)
        allocator = batch.token_to_kv_pool_allocator
        wanted = rows * self.block_size
        evict_from_tree_cache(batch.tree_cache, wanted)
        slots = allocator.alloc(wanted) if wanted <= allocator.available_size() else None
        return None if slots is None else slots.long().view(rows, self.block_size)

    # -- after the forward ----------------------------------------------------------------------------------------

    def _give_back(
        self, rows: OpenRows, roots: list[int], slots: torch.Tensor, blocks: list[BlockOutcome | None], batch: Any
    ) -> None:
        """Free the drafts' pages; pages of accepted final blocks replace the open blocks', which are freed instead."""
        if not len(slots):
            return
        left = set(slots[:, 0].tolist())
        swapped = [
            (root, block.slots) for root, block in zip(roots, blocks, strict=True) if block and block.slots is not None
        ]
        if swapped:
            at, kept = torch.tensor([root for root, _ in swapped]), torch.stack([page for _, page in swapped])
            table = batch.req_to_token_pool.req_to_token
            table[rows.tables[at, None], rows.starts[at, None] + torch.arange(self.block_size)] = kept.to(table.dtype)
            left -= set(kept[:, 0].tolist())
            left |= set(rows.slots[at, 0].tolist())
        pages = torch.tensor(sorted(left))[:, None] + torch.arange(self.block_size)
        batch.token_to_kv_pool_allocator.free(pages.flatten())

    def _record(self, current: Round, blocks: list[BlockOutcome | None]) -> None:
        """Count the states of requests that are replayed."""
        for number, (root, block) in enumerate(zip(current.roots, blocks, strict=True)):
            if block is not None and current.served[number].options.replayed:
                before, sampled = current.rows.tokens[root].numpy(), bool(current.rules.temperatures[number] > 0)
                self.recording.observe(current.reqs[number], sampled, before, block.state)

    def _count(
        self, current: Round, drafts: list[StateDraft], blocks: list[BlockOutcome | None], outcomes: list[StepOutcome]
    ) -> None:
        states = [0] * len(blocks)
        for draft in drafts:
            states[draft.request] += 1
        self.states.observe(
            open_blocks=sum(block is not None for block in blocks),
            drafted=len(drafts),
            planned=[
                count
                for count, request, block in zip(states, current.served, blocks, strict=True)
                if block is not None and request.planned
            ],
            accepted=[len(block.accepted) for block in blocks if block is not None],
            joined=sum(outcome.committed for outcome in outcomes),
            tokens=sum(len(outcome.complete) for outcome in outcomes) * self.block_size,
        )

    def _time(self, began: float, rows: int, current: Round, alone: bool) -> None:
        """Record the time of a round of `rows` rows; alone: no request has more than its last two blocks in it."""
        ended = time.perf_counter()
        seconds = ended - (self._ended if began - self._ended < IDLE_SECONDS else began)
        self._ended = ended
        deciding = self.drafting.decided(sum(root >= 0 for root in current.roots))
        if min(current.roots) < 0 or not alone:  # a prompt is being read
            return
        requests, cost = len(current.roots), self.drafting.planner.cost
        predicted = (
            float(cost.seconds(np.array([rows]), requests, current.context)[0]) + deciding if cost.known else None
        )
        cost.observe(rows, seconds - deciding, requests, current.context)
        self.metrics.observe_time(seconds, predicted)
        self.metrics.planner_seconds.observe(deciding)
        self.recording.rounds.append((requests, rows, seconds))

    def _outcome(self, start: int, block: BlockOutcome) -> StepOutcome:
        if block.opened is None:
            return StepOutcome.of(start, block.state.tolist(), self.mask_id)
        opened = StepOutcome.of(start, block.opened.tolist(), self.mask_id)
        return StepOutcome(start, [block.state.tolist(), *opened.complete], opened.open, committed=True)
