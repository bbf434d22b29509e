"""Spiffy (arXiv 2509.18085): states that open blocks may come to stand beside them in the same forward.

Base decoding steps every open block once a round. Here its drafts are stepped as well, by the same policy, and a block
goes on from draft to draft as long as its next state is one. So it comes through the same states, in fewer rounds.
Drafts are rows of the round's flattened batch that share the page table of what is before them; their pages are taken
and given back within the round, but for that of a final block, which takes the place of the open one's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache

from outrider.kernels.sampling import Rules
from outrider.scheduler.draft_graphs.graph import DraftGraph
from outrider.scheduler.draft_graphs.planning import Acceptance, StatePlanner
from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.diffusion.algorithm import BlockDiffusion, Outcome
from outrider.server.plugin.diffusion.candidates import likely_tokens
from outrider.server.plugin.diffusion.drafts import Draft, Found, found, with_drafts
from outrider.server.plugin.diffusion.forward import BlockRows
from outrider.server.plugin.diffusion.metrics import DiffusionMetrics
from outrider.server.plugin.diffusion.policy import noise_keys, steps_of
from outrider.server.plugin.diffusion.proposals import Known, Proposals, propose
from outrider.server.plugin.diffusion.recording import RANKS, Recording
from outrider.server.plugin.loading.draft_graphs import load_graphs
from outrider.server.plugin.loading.planner import load_round_cost
from outrider.server.plugin.options import RequestOptions

IDLE_SECONDS = 0.02
"""Between two rounds, from which on nobody was served in between."""
_names = itertools.count()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of drafting, read once. name: a number that no other request has."""

    name: int
    options: RequestOptions

    @classmethod
    def of(cls, req: Any, planner: str) -> Asked:
        """planner: the server's; verify-all plans nothing, and every draft stands in the forward."""
        if not hasattr(req, "outrider_asked"):
            options = RequestOptions.from_custom_params(req.sampling_params.custom_params)
            options = replace(options, planned=options.planned and planner != "verify-all")
            req.outrider_asked = cls(next(_names), options)
        asked: Asked = req.outrider_asked
        return asked


@dataclass(frozen=True, slots=True)
class Proposed:
    """What may be drafted for requests of one class, and of how many drafts each has, [n]."""

    sampled: bool
    proposals: Proposals
    drafted: list[int]


class Spiffy(BlockDiffusion):
    """Block diffusion with drafts. graphs: by whether a request is sampled."""

    graphs: dict[bool, DraftGraph]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config = PluginConfig.from_env()
        self.reload_profile()
        self.forget_records()
        self.states = DiffusionMetrics()
        self._ended = 0.0  # when the last round did, on the host's clock
        self._deciding = 0.0  # seconds of this round that went to drafts, but for the forward

    def reload_profile(self) -> None:
        """Draft and plan by the profile as it now stands on the disk."""
        self.graphs = load_graphs(self.config)
        self.acceptance = {False: Acceptance(), True: Acceptance()}
        self.planner = StatePlanner(load_round_cost(self.config))

    def forget_records(self) -> None:
        self.recording = Recording(self.mask_id)

    def outrider_state(self) -> dict[str, Any]:
        """What was recorded since `forget_records`, for another process."""
        return self.recording.to_json()

    def outrider_live(self) -> dict[str, Any]:
        totals = self.states.totals
        drafted, accepted = totals["drafted"], totals["accepted"]
        return super().outrider_live() | {
            "steps": totals["forwards"],
            "request_steps": totals["request_forwards"],
            "tokens": totals["tokens"],
            "drafted": drafted,
            "verified": drafted,
            "accepted": accepted,
            "wasted": drafted - accepted,
            "diffusion": dict(totals),
        }

    def flush(self) -> None:
        """Bring what Prometheus is told up to date."""
        self.states.flush()
        self.metrics.flush()

    def generate(self, runner: Any, forward_batch: Any, batch: Any) -> list[Outcome]:
        reqs, began = batch.reqs, time.perf_counter()
        rows = self.rows(forward_batch, reqs)
        sampling = self.sampling(forward_batch, reqs)
        lengths = [length // self.block_size for length in forward_batch.extend_seq_lens_cpu]
        last = (np.cumsum(lengths) - 1).tolist()
        owner = torch.repeat_interleave(torch.arange(len(reqs)), torch.tensor(lengths))
        roots = [row if is_open else -1 for row, is_open in zip(last, rows.open[last].tolist(), strict=True)]
        context = float(sum(forward_batch.extend_prefix_lens_cpu))
        drafts, proposed = self._drafts(rows, roots, reqs, sampling[0], context, runner)
        slots = self._slots(sum(draft.rows for draft in drafts), batch)
        if slots is None:
            drafts, proposed, slots = [], [], rows.slots[:0]
        first, rows = len(rows), with_drafts(rows, roots, drafts, slots, self.mask_id)
        if drafts:
            owner = torch.cat([owner, torch.tensor([draft.request for draft in drafts for _ in range(draft.rows)])])
        masked = (rows.tokens == self.mask_id) & rows.open[:, None]
        logits = self.forward(runner).run(rows, masked, forward_batch)
        stepped = self.step(rows, masked, logits, owner, sampling).numpy()
        blocks = found(rows, stepped, roots, drafts, first, self.mask_id)
        self._give_back(rows, roots, slots, blocks, batch)
        self._remember(rows, masked, logits, blocks, reqs, sampling)
        self._record(rows, roots, blocks, reqs, sampling[0])
        outcomes = [
            Outcome(start + self.block_size) if block is None else self._outcome(start, block)
            for start, block in zip(rows.starts[last].tolist(), blocks, strict=True)
        ]
        self._learn(proposed, stepped, roots, blocks)
        self._count(reqs, drafts, blocks, outcomes)
        ended = time.perf_counter()
        if min(roots) >= 0 and max(lengths) <= 2:  # none is reading its prompt
            between = began - self._ended
            seconds = ended - (self._ended if between < IDLE_SECONDS else began)
            self._time(len(rows), len(roots), context, seconds)
            self.recording.rounds.append((len(roots), len(rows), seconds))
        self._ended = ended
        return outcomes

    def _asked(self, req: Any) -> Asked:
        return Asked.of(req, self.config.planner)

    # -- before the forward ---------------------------------------------------------------------------------------

    def _drafts(
        self, rows: BlockRows, roots: list[int], reqs: Sequence[Any], rules: Rules, context: float, runner: Any
    ) -> tuple[list[Draft], list[Proposed]]:
        """What is drafted in this round, and of what it was chosen."""
        began, asked = time.perf_counter(), [self._asked(req) for req in reqs]
        planned = [number for number, own in enumerate(asked) if own.options.planned and own.options.enabled]
        looks = bool(planned) and self.planner.looks(np.array([asked[number].name for number in planned]))
        able = [
            number
            for number, (root, own) in enumerate(zip(roots, asked, strict=True))
            if root >= 0 and own.options.enabled and not own.options.padded and (looks or not own.options.planned)
        ]
        found = self._proposals(able, rows, roots, reqs, asked, (rules.temperatures > 0).tolist(), runner)
        counts = [
            [0 if asked[number].options.planned else n for number, n in zip(own.requests, own.counts, strict=True)]
            for _, own in found
        ]
        if looks:
            self._plan(planned, asked, len(rows), context, found, counts)
        drafts = [
            draft
            for (_, own), some in zip(found, counts, strict=True)
            for place, n in enumerate(some)
            if n
            for draft in own.drafts(place, n)
        ]
        for number, (root, own) in enumerate(zip(roots, asked, strict=True)):
            if root >= 0 and own.options.padded:
                drafts += _padding(number, rows, root, own.options.gamma or 0)
        self._deciding = time.perf_counter() - began if looks and found else 0.0
        return drafts, [Proposed(drawn, own, some) for (drawn, own), some in zip(found, counts, strict=True)]

    def _proposals(
        self,
        able: list[int],
        rows: BlockRows,
        roots: list[int],
        reqs: Sequence[Any],
        asked: list[Asked],
        sampled: list[bool],
        runner: Any,
    ) -> list[tuple[bool, Proposals]]:
        """Of the requests that are `able`, by whether they are sampled; nothing where nothing is known of any."""
        starts, states = rows.starts.tolist(), rows.tokens.numpy()
        made = []
        for drawn in (False, True):
            graph, numbers, limits = self.graphs[drawn], [], []
            for number in able:
                known, root = getattr(reqs[number], "outrider_known", None), roots[number]
                limit = asked[number].options.draft_limit(len(graph))
                if limit and sampled[number] == drawn and known and known.holds(starts[root], states[root]):
                    numbers.append(number)
                    limits.append(limit)
            if numbers:
                known = [reqs[number].outrider_known for number in numbers]
                goes_on = [
                    self._goes_on(reqs[number], own.start, runner) for number, own in zip(numbers, known, strict=True)
                ]
                made.append(
                    (drawn, propose(graph, self.acceptance[drawn], numbers, known, goes_on, limits, self.mask_id))
                )
        return made

    def _plan(
        self,
        planned: list[int],
        asked: list[Asked],
        rows: int,
        context: float,
        found: list[tuple[bool, Proposals]],
        counts: list[list[int]],
    ) -> None:
        """Have the planner say how many drafts the requests have that leave it to it; written into `counts`."""
        free: dict[int, tuple[list[int], int, np.ndarray, np.ndarray]] = {}
        for (_, own), some in zip(found, counts, strict=True):
            costs = own.rows()
            for place, number in enumerate(own.requests):
                if asked[number].options.planned:
                    n = own.counts[place]
                    free[number] = some, place, own.chances[place, :n], costs[place, :n]
        none = np.zeros(0)
        chosen = self.planner.admit(
            np.array([asked[number].name for number in planned]),
            rows + sum(sum(some) for some in counts),
            context,
            [free[number][2] if number in free else none for number in planned],
            [free[number][3] if number in free else none for number in planned],
        )
        for number, n in zip(planned, chosen, strict=True):
            if number in free:
                some, place = free[number][:2]
                some[place] = n

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
        if not len(slots):
            return
        left = set(slots[:, 0].tolist())
        swapped = [
            (root, block.slots) for root, block in zip(roots, blocks, strict=True) if block and block.slots is not None
        ]
        if swapped:
            at, kept = torch.tensor([root for root, _ in swapped]), torch.stack([own for _, own in swapped])
            table = batch.req_to_token_pool.req_to_token
            table[rows.tables[at, None], rows.starts[at, None] + torch.arange(self.block_size)] = kept.to(table.dtype)
            left -= set(kept[:, 0].tolist())
            left |= set(rows.slots[at, 0].tolist())
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
        """Keep, with each request, what the last forward said of what is still masked, where the next may draft."""
        began, rests = time.perf_counter(), self.planner.rests
        open_blocks = {
            number: block
            for number, block in enumerate(blocks)
            if block is not None
            and (block.newest == self.mask_id).any()
            and _may_draft(self._asked(reqs[number]).options, rests)
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
        if any(self._asked(reqs[number]).options.replayed for number in going):
            count = max(count, RANKS)
        best, chances = likely_tokens(logits[place[which, where]], rules.of(owner), keys, count)
        tokens = torch.zeros(*newest.shape, count, dtype=torch.int64)
        probabilities = torch.zeros(*newest.shape, count)
        tokens[which, where], probabilities[which, where] = best, chances
        for number, row, state, t, p in zip(going, at.tolist(), newest, tokens, probabilities, strict=True):
            reqs[number].outrider_known = Known(int(rows.starts[row]), state.numpy(), t.numpy(), p.numpy())
        if self._deciding:
            self._deciding += time.perf_counter() - began

    def _record(
        self, rows: BlockRows, roots: list[int], blocks: list[Found | None], reqs: Sequence[Any], rules: Rules
    ) -> None:
        """Count the states of requests that are replayed."""
        for number, (root, block) in enumerate(zip(roots, blocks, strict=True)):
            if block is not None and self._asked(reqs[number]).options.replayed:
                before, sampled = rows.tokens[root].numpy(), bool(rules.temperatures[number] > 0)
                self.recording.observe(reqs[number], sampled, before, block.state)

    def _learn(
        self, proposed: list[Proposed], stepped: np.ndarray, roots: list[int], blocks: list[Found | None]
    ) -> None:
        """How often drafts are accepted, and how long it takes to make them."""
        for own in proposed:
            requests = own.proposals.requests
            paths = [block.accepted if (block := blocks[number]) else [] for number in requests]
            after = stepped[[roots[number] for number in requests]]
            own.proposals.observe(after, own.drafted, paths, self.acceptance[own.sampled])
        if self._deciding:
            self.planner.observe_deciding(self._deciding)

    def _time(self, rows: int, open_blocks: int, context: float, seconds: float) -> None:
        """A round has taken so long."""
        cost = self.planner.cost
        predicted = float(cost.seconds(np.array([rows]), open_blocks, context)[0]) if cost.known else None
        cost.observe(rows, seconds, open_blocks, context)
        self.metrics.observe_time(seconds, predicted)
        self.metrics.planner_seconds.observe(self._deciding)

    def _count(
        self, reqs: Sequence[Any], drafts: list[Draft], blocks: list[Found | None], outcomes: list[Outcome]
    ) -> None:
        """Tell Prometheus."""
        states = [0] * len(reqs)
        for draft in drafts:
            states[draft.request] += 1
        self.states.observe(
            open_blocks=sum(block is not None for block in blocks),
            drafted=len(drafts),
            planned=[
                own
                for own, req, block in zip(states, reqs, blocks, strict=True)
                if block is not None and (options := self._asked(req).options).planned and options.enabled
            ],
            accepted=[len(block.accepted) for block in blocks if block is not None],
            joined=sum(outcome.committed for outcome in outcomes),
            tokens=sum(len(outcome.complete) for outcome in outcomes) * self.block_size,
        )

    def _outcome(self, start: int, block: Found) -> Outcome:
        if block.opened is None:
            return Outcome.of(start, block.state.tolist(), self.mask_id)
        opened = Outcome.of(start, block.opened.tolist(), self.mask_id)
        return Outcome(start, [block.state.tolist(), *opened.complete], opened.open, committed=True)


def _padding(number: int, rows: BlockRows, root: int, gamma: int) -> list[Draft]:
    """Drafts that are not accepted, with which a request has 1 + gamma rows in a round."""
    own = int((rows.tables == rows.tables[root]).sum())
    draft = Draft(number, rows.tokens[root].numpy(), complete=False, score=0.0, depth=1, chance=0.0)
    return [draft] * (1 + gamma - own)


def _may_draft(options: RequestOptions, rests: bool) -> bool:
    return options.enabled and not (options.planned and rests)
