"""Spiffy (arXiv 2509.18085): states that open blocks may come to stand beside them in the same forward.

Base decoding steps every open block once a round. Here its drafts are stepped as well, by the same policy, and a block
goes on from draft to draft as long as its next state is one. So it comes through the same states, in fewer rounds.
Drafts are rows of the round's flattened batch that share the page table of what is before them; their pages are taken
and given back within the round, but for that of a final block, which takes the place of the open one's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from outrider.kernels.sampling import Rules
from outrider.scheduler.draft_graphs.fill import Candidates, fill
from outrider.scheduler.draft_graphs.graph import DraftGraph
from outrider.scheduler.draft_graphs.planning import Acceptance, StatePlanner
from outrider.scheduler.draft_graphs.prune import admission_order, scores
from outrider.scheduler.draft_graphs.untuned import untuned_graph
from outrider.server.plugin.diffusion.algorithm import BlockDiffusion, Outcome
from outrider.server.plugin.diffusion.candidates import likely_tokens
from outrider.server.plugin.diffusion.drafts import Draft, Found, found, with_drafts
from outrider.server.plugin.diffusion.forward import BlockRows
from outrider.server.plugin.diffusion.metrics import DiffusionMetrics
from outrider.server.plugin.diffusion.policy import Static, noise_keys, steps_of
from outrider.server.plugin.options import RequestOptions

IDLE_SECONDS = 0.02
"""Between two rounds, from which on nobody was served in between."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the forward before said of a request's open block.

    start, state: where the block is, and its newest state, [B] int64. tokens, probabilities: [B, J] of each position,
    the likeliest first; of revealed ones of no meaning.
    """

    start: int
    state: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray


class Spiffy(BlockDiffusion):
    """Block diffusion with drafts. graphs: by whether a request is sampled."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        step_tokens = self.policy.tokens if isinstance(self.policy, Static) else None
        graph = untuned_graph(self.block_size, step_tokens)
        self.graphs: dict[bool, DraftGraph] = {False: graph, True: graph}
        self.acceptance = {False: Acceptance(), True: Acceptance()}
        self.planner = StatePlanner()
        self.states = DiffusionMetrics()
        self._ended = 0.0  # when the last round did, on the host's clock

    def outrider_live(self) -> dict[str, Any]:
        return super().outrider_live() | {"diffusion": dict(self.states.totals)}

    def generate(self, runner: Any, forward_batch: Any, batch: Any) -> list[Outcome]:
        reqs, began = batch.reqs, time.perf_counter()
        rows = self.rows(forward_batch, reqs)
        sampling = self.sampling(forward_batch, reqs)
        sampled = (sampling[0].temperatures > 0).tolist()
        counts = torch.tensor(forward_batch.extend_seq_lens_cpu) // self.block_size
        last, owner = (counts.cumsum(0) - 1).tolist(), torch.repeat_interleave(torch.arange(len(reqs)), counts)
        roots = [row if is_open else -1 for row, is_open in zip(last, rows.open[last].tolist(), strict=True)]
        drafts = self._drafts(rows, roots, reqs, sampled, runner)
        slots = self._slots(sum(draft.rows for draft in drafts), batch)
        if slots is None:
            drafts, slots = [], rows.slots[:0]
        first, rows = len(rows), with_drafts(rows, roots, drafts, slots, self.mask_id)
        owner = torch.cat([owner, torch.tensor([draft.request for draft in drafts for _ in range(draft.rows)]).long()])
        masked = (rows.tokens == self.mask_id) & rows.open[:, None]
        logits = self.forward(runner).run(rows, masked, forward_batch)
        stepped = self.step(rows, masked, logits, owner, sampling).numpy()
        blocks = found(rows, stepped, roots, drafts, first, self.mask_id)
        self._give_back(rows, roots, slots, blocks, batch)
        self._remember(rows, masked, logits, blocks, reqs, sampling)
        outcomes = [
            Outcome(start + self.block_size) if block is None else self._outcome(start, block)
            for start, block in zip(rows.starts[last].tolist(), blocks, strict=True)
        ]
        self._count(drafts, sampled, blocks, outcomes)
        ended = time.perf_counter()
        if min(roots) >= 0 and int(counts.max()) <= 2:  # none is reading its prompt
            between = began - self._ended
            self.planner.cost.observe(len(rows), ended - (self._ended if between < IDLE_SECONDS else began))
        self._ended = ended
        return outcomes

    # -- before the forward ---------------------------------------------------------------------------------------

    def _drafts(
        self, rows: BlockRows, roots: list[int], reqs: Sequence[Any], sampled: list[bool], runner: Any
    ) -> list[Draft]:
        """What is drafted in this round, by request."""
        free: list[list[Draft]] = [[] for _ in reqs]  # for the planner to choose of
        decided: list[Draft] = []
        for number, (root, req) in enumerate(zip(roots, reqs, strict=True)):
            known: Known | None = getattr(req, "outrider_known", None)
            options = RequestOptions.from_custom_params(req.sampling_params.custom_params)
            limit = options.draft_limit(len(self.graphs[sampled[number]]))
            if root < 0 or known is None or not limit:
                continue
            state, start = rows.tokens[root].numpy(), int(rows.starts[root])
            if known.start == start and np.array_equal(known.state, state):
                goes_on = self._goes_on(req, start, runner)
                own = list(islice(self._states(number, known, sampled[number], goes_on), limit))
                if options.planned:
                    free[number] = own
                else:
                    decided += own
        if any(free):
            counts = self.planner.admit(
                sum(root >= 0 for root in roots),
                len(rows) + sum(draft.rows for draft in decided),
                [np.array([draft.chance for draft in own]) for own in free],
                [np.array([draft.rows for draft in own], dtype=np.int64) for own in free],
            )
            decided += [draft for own, count in zip(free, counts, strict=True) for draft in own[:count]]
        return decided

    def _states(self, number: int, known: Known, sampled: bool, goes_on: bool) -> Iterator[Draft]:
        """Drafts of an open block, the best first; goes_on: a block follows it, so that complete ones are of use."""
        graph, candidates = self.graphs[sampled], Candidates(known.tokens[None], known.probabilities[None])
        filled = fill(graph, known.state[None], candidates, self.mask_id)
        complete = ~(filled.states[0] == self.mask_id).any(1)
        if not goes_on:
            filled.fits[0] &= ~complete
        worth = scores(graph, filled)
        order = admission_order(graph, filled, worth)[0]
        order = order[order >= 0]
        chances = self.acceptance[sampled].chances(worth[0, order], graph.depths[order])
        for node, chance in zip(order.tolist(), chances.tolist(), strict=True):
            depth, score = int(graph.depths[node]), float(worth[0, node])
            yield Draft(number, filled.states[0, node], bool(complete[node]), score, depth, chance)

    def _goes_on(self, req: Any, start: int, runner: Any) -> bool:
        """Whether a block follows the open one."""
        end = start + self.block_size
        longest = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        return end < longest and end + self.block_size <= runner.req_to_token_pool.req_to_token.shape[1]

    def _slots(self, rows: int, batch: Any) -> torch.Tensor | None:
        """[rows, B] int64 slots for drafts; None where there is no room."""
        allocator = batch.token_to_kv_pool_allocator
        wanted = rows * self.block_size
        evict_from_tree_cache(batch.tree_cache, wanted)
        slots = allocator.alloc(wanted) if wanted <= allocator.available_size() else None
        return None if slots is None else slots.long().view(rows, self.block_size)

    # -- behind the forward ---------------------------------------------------------------------------------------

    def _give_back(
        self, rows: BlockRows, roots: list[int], slots: torch.Tensor, blocks: list[Found | None], batch: Any
    ) -> None:
        """Free the drafts' pages; those of accepted final blocks take the places of the open blocks', which go."""
        left = set(slots[:, 0].tolist())
        for root, block in zip(roots, blocks, strict=True):
            if block is None or block.slots is None:
                continue
            start = int(rows.starts[root])
            table = batch.req_to_token_pool.req_to_token[int(rows.tables[root])]
            table[start : start + self.block_size] = block.slots.to(table.dtype)
            left.remove(int(block.slots[0]))
            left.add(int(rows.slots[root, 0]))
        if left:
            pages = torch.tensor(sorted(left))[:, None] + torch.arange(self.block_size)
            batch.token_to_kv_pool_allocator.free(pages.flatten())

    def _remember(
        self,
        rows: BlockRows,
        masked: torch.Tensor,
        logits: torch.Tensor,
        blocks: list[Found | None],
        reqs: Sequence[Any],
        sampling: tuple[Rules, torch.Tensor],
    ) -> None:
        """Keep, with each request, what the last forward said of what is still masked."""
        open_blocks = {
            number: block
            for number, block in enumerate(blocks)
            if block is not None and (block.newest == self.mask_id).any() and _drafts_at_all(reqs[number])
        }
        if not open_blocks:
            return
        going = list(open_blocks)
        rules, seeds = sampling
        newest = torch.from_numpy(np.stack([block.newest for block in open_blocks.values()]))
        at = torch.tensor([block.row for block in open_blocks.values()])
        place = torch.full(masked.shape, -1).masked_scatter(masked, torch.arange(len(logits)))[at]
        which, where = (newest == self.mask_id).nonzero(as_tuple=True)
        owner = torch.tensor(going)[which]
        keys = noise_keys(seeds[owner], rows.starts[at[which]] + where, steps_of(newest, self.mask_id)[which])
        count = max(graph.vocabulary_ranks for graph in self.graphs.values())
        best, chances = likely_tokens(logits[place[which, where]], rules.of(owner), keys, count)
        tokens = torch.zeros(*newest.shape, count, dtype=torch.int64)
        probabilities = torch.zeros(*newest.shape, count)
        tokens[which, where], probabilities[which, where] = best, chances
        for number, row, state, t, p in zip(going, at.tolist(), newest, tokens, probabilities, strict=True):
            reqs[number].outrider_known = Known(int(rows.starts[row]), state.numpy(), t.numpy(), p.numpy())

    def _count(
        self, drafts: list[Draft], sampled: list[bool], blocks: list[Found | None], outcomes: list[Outcome]
    ) -> None:
        """Learn how often drafts are accepted, and tell Prometheus."""
        for number, block in enumerate(blocks):
            own = [draft for draft in drafts if draft.request == number]
            if block is not None and own:
                accepted = np.zeros(len(own), dtype=bool)
                accepted[block.accepted] = True
                self.acceptance[sampled[number]].observe(
                    np.array([draft.score for draft in own]), np.array([draft.depth for draft in own]), accepted
                )
        self.states.observe(
            open_blocks=sum(block is not None for block in blocks),
            drafted=len(drafts),
            accepted=[len(block.accepted) for block in blocks if block is not None],
            joined=sum(outcome.committed for outcome in outcomes),
            tokens=sum(len(outcome.complete) for outcome in outcomes) * self.block_size,
        )

    def _outcome(self, start: int, block: Found) -> Outcome:
        if block.opened is None:
            return Outcome.of(start, block.state.tolist(), self.mask_id)
        opened = Outcome.of(start, block.opened.tolist(), self.mask_id)
        return Outcome(start, [block.state.tolist(), *opened.complete], opened.open, committed=True)


def _drafts_at_all(req: Any) -> bool:
    return RequestOptions.from_custom_params(req.sampling_params.custom_params).enabled
