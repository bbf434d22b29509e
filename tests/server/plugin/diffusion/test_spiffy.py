"""Rounds with drafts over a paged cache of tokens read the same as base decoding."""

import functools
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from block_outcomes import enumerated, top_chances
from chi_square import p_value

from outrider.kernels.sampling import Rules
from outrider.scheduler.spiffy.calibration import NodeCounts, Trajectory, choose
from outrider.scheduler.spiffy.fill import Candidates, fill
from outrider.scheduler.spiffy.planning import RoundView
from outrider.server.plugin import measuring
from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.diffusion import drafts as draft_rows
from outrider.server.plugin.diffusion.forward import OpenRows
from outrider.server.plugin.diffusion.policy import Static, ThresholdUnmasking
from outrider.server.plugin.diffusion.spiffy import Spiffy
from outrider.server.plugin.diffusion.target import DiffusionTarget

BLOCK, MASK, VOCABULARY, CONTEXT = 4, 0, 12, 64
PAGES = 32


class Cache:
    """Tokens instead of keys and values; `alloc` and `free` as in SGLang's page allocator."""

    def __init__(self, pages: int) -> None:
        self.tokens = torch.full(((pages + 1) * BLOCK,), -1)
        self.free_pages = list(range(1, pages + 1))
        self.taken: set[int] = set()

    def available_size(self) -> int:
        return len(self.free_pages) * BLOCK

    def alloc(self, size: int) -> torch.Tensor:
        pages = [self.free_pages.pop() for _ in range(size // BLOCK)]
        self.taken.update(pages)
        return (torch.tensor(pages, dtype=torch.int64)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()

    def free(self, slots: torch.Tensor) -> None:
        pages = (slots.view(-1, BLOCK)[:, 0] // BLOCK).tolist()
        assert self.taken.issuperset(pages)
        assert len(set(pages)) == len(pages)
        self.taken.difference_update(pages)
        self.free_pages += pages


class Model:
    """Logits that are a function of the tokens visible to a block, read from the cache page by page."""

    def __init__(self, cache: Cache, table: torch.Tensor) -> None:
        self.cache, self.table, self.forwards = cache, table, 0

    def run(self, rows: OpenRows, wanted: torch.Tensor, _: Any) -> torch.Tensor:
        self.forwards += 1
        for slots, tokens in zip(rows.slots, rows.tokens, strict=True):
            self.cache.tokens[slots] = tokens
        logits = []
        for row, start in enumerate(rows.starts.tolist()):
            seen = self.cache.tokens[self.table[rows.tables[row], :start].long()]
            if (above := int(rows.above[row])) >= 0:
                seen[-BLOCK:] = self.cache.tokens[rows.slots[above]]
            assert not (seen == MASK).any()
            logits.append(self.logits(tuple(seen.tolist()), tuple(rows.tokens[row].tolist())))
        return torch.stack(logits)[wanted]

    @staticmethod
    @functools.cache
    def logits(before: tuple[int, ...], block: tuple[int, ...]) -> torch.Tensor:
        firm = np.random.default_rng(crc32(bytes(before))).normal(size=(BLOCK, VOCABULARY)) * 2
        own = np.random.default_rng(crc32(bytes([*before, *block]))).normal(size=(BLOCK, VOCABULARY))
        return torch.from_numpy(firm + 0.3 * own).float()


@pytest.fixture(scope="module")
def spiffy() -> Spiffy:
    target = DiffusionTarget(block_size=BLOCK, mask_token_id=MASK)
    with pytest.MonkeyPatch.context() as patch:
        environ: dict[str, str] = {}
        PluginConfig(diffusion=target, unmasking="static").to_env(environ)
        for name, value in environ.items():
            patch.setenv(name, value)
        return Spiffy(SimpleNamespace(block_size=BLOCK, mask_id=MASK, first_done_first_out_mode=True))


def decode(
    spiffy: Spiffy,
    temperatures: list[float],
    drafts: dict[str, Any],
    *,
    length: int = 24,
    first_seed: int = 7,
    top_k: int = 0,
) -> tuple[list[list[int]], int, float]:
    """Answers, number of forwards, and accepted drafts; only final blocks stay in the cache."""
    count = len(temperatures)
    cache = Cache(count * PAGES)
    table = torch.zeros(count, CONTEXT, dtype=torch.int32)
    spiffy._forward = model = Model(cache, table)  # type: ignore[assignment]
    rules = Rules(torch.tensor(temperatures), torch.full((count,), top_k) if top_k else None)
    spiffy.sampling = lambda *_: (rules, first_seed + torch.arange(count))  # type: ignore
    params = SimpleNamespace(max_new_tokens=length, custom_params={"outrider": drafts})
    reqs = [
        SimpleNamespace(origin_input_ids=[], sampling_params=params, tokens=[], state=None, kept=0)
        for _ in temperatures
    ]
    before = spiffy.states.totals["accepted"]
    while any(len(req.tokens) < length for req in reqs):
        lengths, slots = [], []
        for number, req in enumerate(reqs):
            req.full_untruncated_fill_ids = req.tokens + (req.state or [MASK] * BLOCK)
            lengths.append(len(req.full_untruncated_fill_ids) - req.kept)
            slots.append(cache.alloc(lengths[-1]))
            table[number, req.kept : req.kept + lengths[-1]] = slots[-1].int()
        forward_batch = SimpleNamespace(
            input_ids=torch.tensor([t for req in reqs for t in req.full_untruncated_fill_ids[req.kept :]]),
            extend_prefix_lens_cpu=[req.kept for req in reqs],
            extend_seq_lens_cpu=lengths,
            req_pool_indices=torch.arange(count),
            out_cache_loc=torch.cat(slots),
        )
        pool = SimpleNamespace(req_to_token=table)
        batch = SimpleNamespace(reqs=reqs, token_to_kv_pool_allocator=cache, tree_cache=None, req_to_token_pool=pool)
        outcomes = spiffy.generate(SimpleNamespace(req_to_token_pool=pool), forward_batch, batch)
        for number, (req, outcome) in enumerate(zip(reqs, outcomes, strict=True)):
            end, kept = req.kept + lengths[number], outcome.kept + BLOCK * outcome.committed
            req.tokens += [token for block in outcome.complete for token in block]
            assert cache.tokens[table[number, :kept].long()].tolist() == req.tokens[:kept]
            if kept < end:
                cache.free(table[number, kept:end].long())
            req.state, req.kept = outcome.open, kept
    assert len(cache.taken) == sum(req.kept for req in reqs) // BLOCK
    return [req.tokens[:length] for req in reqs], model.forwards, spiffy.states.totals["accepted"] - before


@pytest.mark.parametrize("temperatures", [[0.0], [1.0], [0.0, 1.0, 0.7, 0.0]])
@pytest.mark.parametrize("policy", [Static(1), Static(2), ThresholdUnmasking(0.4), ThresholdUnmasking(0.9)], ids=str)
def test_tokens_equal_base_decoding(
    spiffy: Spiffy, policy: Static | ThresholdUnmasking, temperatures: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"unmasking_tokens": policy.tokens} if isinstance(policy, Static) else {"unmasking": "threshold"}
    config = replace(spiffy.config, **fields)
    for name, value in {"policy": policy, "config": config, "drafting": spiffy.drafting}.items():
        monkeypatch.setattr(spiffy, name, value)
    spiffy.reload_profile()  # drafts as many tokens as a step reveals
    expected, base, _ = decode(spiffy, temperatures, {"enabled": False})
    for states in (1, 3, 10):
        tokens, forwards, accepted = decode(spiffy, temperatures, {"gamma": states, "planned": False})
        assert tokens == expected
        assert accepted > 0
        assert forwards < base
    assert decode(spiffy, temperatures, {})[0] == expected


def test_the_next_drafts_come_from_the_row_of_the_newest_state() -> None:
    """A wrong row costs drafts, not tokens: no text shows it."""
    root, half, whole, opened = [0, 0, 0, 0], [5, 0, 0, 0], [5, 6, 7, 8], [9, 0, 0, 0]
    drafts = [draft_rows.StateDraft(0, np.array(half), False), draft_rows.StateDraft(0, np.array(whole), True)]
    before = OpenRows(
        tokens=torch.tensor([root]), starts=torch.zeros(1, dtype=torch.int64), before=torch.tensor([-1]),
        tables=torch.zeros(1, dtype=torch.int64), slots=torch.zeros(1, BLOCK, dtype=torch.int64),
        open=torch.tensor([True]), above=torch.tensor([-1]),
    )  # fmt: skip
    rows = draft_rows.with_drafts(before, [0], drafts, torch.zeros(3, BLOCK, dtype=torch.int64), MASK)
    for steps, newest, row in (
        ([[5, 6, 0, 0], [5, 6, 0, 0], whole, opened], [5, 6, 0, 0], 0),  # no draft is the next state
        ([half, [5, 6, 0, 0], whole, opened], [5, 6, 0, 0], 1),
        ([half, whole, whole, opened], opened, 3),
    ):
        [outcome] = draft_rows.found(rows, np.array(steps), [0], drafts, 1, MASK)
        assert outcome is not None
        assert (outcome.newest.tolist(), outcome.row) == (newest, row)


def test_replayed_states_are_counted_as_drafts(spiffy: Spiffy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming states by ranks inverts the filling of a graph."""
    traced: list[Trajectory] = []
    add = NodeCounts.add
    monkeypatch.setattr(NodeCounts, "add", lambda counts, one, mask: [traced.append(one), add(counts, one, mask)])
    spiffy.forget_records()
    expected, base, _ = decode(spiffy, [0.0, 1.0], {"enabled": False})
    assert not spiffy.recording.counts[False].roots
    replay = {"gamma": 0, "planned": False, "replayed": True}
    assert decode(spiffy, [0.0, 1.0], replay) == (expected, base, 0)
    counts = spiffy.recording.counts
    assert counts[False].roots == counts[True].roots == 6 * (BLOCK - 1)
    both = NodeCounts()
    for found in counts.values():
        both.update(found)
    for number, node in enumerate(spiffy.drafting.graphs[False].nodes):
        met = 0
        for one in traced:
            for root in range(len(one.states) - 1):
                known = Candidates(one.candidates.tokens[root][None], one.candidates.probabilities[root][None])
                filled = fill(spiffy.drafting.graphs[False], one.states[root][None], known, MASK)
                if filled.fits[0, number]:
                    met += any((filled.states[0, number] == later).all() for later in one.states[root + 1 :])
        assert both.nodes[node] == met, node
    assert max(both.nodes.values()) > 9


def test_a_calibrated_graph_gives_the_same_tokens(spiffy: Spiffy, monkeypatch: pytest.MonkeyPatch) -> None:
    spiffy.forget_records()
    expected, base, _ = decode(spiffy, [0.0, 1.0], {"gamma": 0, "planned": False, "replayed": True})
    graphs = {sampled: choose(counts, 10, 1) for sampled, counts in spiffy.recording.counts.items()}
    monkeypatch.setattr(spiffy.drafting, "graphs", graphs)
    tokens, forwards, accepted = decode(spiffy, [0.0, 1.0], {"gamma": 10, "planned": False})
    assert tokens == expected
    assert accepted > 0
    assert forwards < base


def test_padded_requests_have_the_same_rows_in_every_round(spiffy: Spiffy) -> None:
    expected, base, _ = decode(spiffy, [0.0], {"enabled": False})
    served = spiffy.drafting, spiffy.recording
    measuring.begin(spiffy)
    try:
        assert decode(spiffy, [0.0], {"gamma": 4, "planned": False}) == (expected, base, 0)
        assert {(requests, rows) for requests, rows, _ in spiffy.recording.rounds} == {(1, 5)}
    finally:
        measuring.end(spiffy)
    assert (spiffy.drafting, spiffy.recording) == served


def test_the_planner_knows_each_requests_level_and_progress(spiffy: Spiffy, monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[RoundView] = []
    looks = spiffy.drafting.planner.looks
    monkeypatch.setattr(spiffy.drafting.planner, "looks", lambda view: [views.append(view), looks(view)][1])
    began = time.perf_counter()
    expected, base, _ = decode(spiffy, [0.0, 1.0], {"enabled": False})
    assert not views
    assert decode(spiffy, [0.0, 1.0], {"min_tokens_per_second": 4.0})[0] == expected
    assert 6 < len(views) <= base
    assert all(view.levels.tolist() == [4.0, 4.0] for view in views)
    assert np.isinf(views[0].progress).all()
    last = views[-1].progress
    assert (last > (24 - BLOCK) / (time.perf_counter() - began)).all()
    assert np.isfinite(last).all()


WARM, TOP_K = 0.7, 2
"""Many blocks are likely, and their likelihood depends on the differences of logits."""
DRAWN = 1024


def exact_blocks() -> Counter[tuple[int, ...]]:
    """Probabilities of a first block, one token per step."""

    def chances(state: tuple[int, ...]) -> list[dict[int, float]]:
        return top_chances(Model.logits((), state), MASK, TOP_K, WARM)

    return enumerated(chances, lambda chance: [max(chance, key=chance.__getitem__)], (MASK,) * BLOCK, MASK)


def chance_of_blocks(spiffy: Spiffy, expected: Counter[tuple[int, ...]], total: int = DRAWN) -> float:
    """P-value of the answers' first blocks, with three drafts per round and each of `total` seeds once."""
    counts: Counter[tuple[int, ...]] = Counter()
    options, at_once = {"gamma": 3, "planned": False}, 256
    for seed in range(0, total, at_once):
        answers, _, _ = decode(spiffy, [WARM] * at_once, options, length=BLOCK + 1, first_seed=seed, top_k=TOP_K)
        counts.update(tuple(answer[:BLOCK]) for answer in answers)
    return p_value(counts, expected, total)


@pytest.mark.slow
def test_sampled_blocks_are_distributed_as_enumerated(spiffy: Spiffy) -> None:
    assert chance_of_blocks(spiffy, exact_blocks()) > 1e-4


@pytest.mark.slow
def test_scaled_logits_are_detected(spiffy: Spiffy, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, said = exact_blocks(), Model.logits
    monkeypatch.setattr(Model, "logits", staticmethod(lambda *seen: 1.6 * said(*seen)))
    assert chance_of_blocks(spiffy, expected) < 1e-4


FAULTS = {
    "last draft": lambda root, drafts, *_: [len(drafts) - 1] if drafts else [],
    "first draft": lambda root, drafts, *_: [0] if drafts else [],
    "all but one token": lambda root, drafts, *_: [
        n for n, each in enumerate(drafts) if (each == root).sum() >= BLOCK - 1
    ][:1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_acceptance_is_detected(spiffy: Spiffy, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _, _ = decode(spiffy, [1.0], {"enabled": False})
    monkeypatch.setattr(draft_rows, "follow", FAULTS[fault])
    assert decode(spiffy, [1.0], {"gamma": 3, "planned": False})[0] != expected
    if fault == "last draft":
        assert chance_of_blocks(spiffy, exact_blocks(), 512) < 1e-4
