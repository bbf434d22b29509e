"""Drafting by graphs; a replay runs the captured function again on the same buffers."""

from dataclasses import replace

import pytest
import torch
from graphs_as_functions import record
from margins import assert_near
from tiny_drafters import CONFIGS, PATHS, TERMS, make_drafter

from outrider.drafters.base import DraftBatch
from outrider.drafters.graphs import DraftGraphs
from outrider.kernels.cuda import native as cuda
from outrider.kernels.noise import draft_keys

SIZES, REQUESTS, CONTEXT = (1, 2, 4, 7), 7, 32


@pytest.fixture(params=CONFIGS | PATHS)
def drafter(request):
    made = make_drafter((CONFIGS | PATHS)[request.param], slots=1 + REQUESTS * CONTEXT)
    for keys, values in made.pools:
        keys.normal_()
        values.normal_()
    if made.contexts is not None:
        made.contexts.normal_()
    return made


def batch_of(count: int, table: torch.Tensor, gamma: int, kinds: torch.Tensor, *names: str) -> DraftBatch:
    """Greedy and sampled requests with these rules, some of them seeded; keys for longer drafts, as with a lookup."""
    filters = {
        "top_ks": torch.randint(1, 9, (count,)),
        "top_ps": torch.rand(count),
        "min_ps": torch.rand(count) / 2,
        "decided": ~kinds | (torch.rand(count) < 0.3),
    }
    seeds, seeded = torch.randint(1 << 40, (count,)), torch.rand(count) < 0.4
    seq_lens = torch.randint(1, CONTEXT - 8, (count,))
    return DraftBatch(
        anchors=torch.randint(96, (count,)), seq_lens=seq_lens, page_table=table,
        rows=1 + torch.randperm(REQUESTS)[:count], temperatures=torch.where(kinds, 0.8, 0.0),
        keys=draft_keys(seeds, seeded, seq_lens, gamma + 2), seeds=seeds, seeded=seeded,
        wants_probs="decided" in names, **{name: filters[name] for name in names},
    )  # fmt: skip


def room_of(drafter) -> torch.Tensor:
    return torch.full((REQUESTS, drafter.gamma, drafter.model.config.logit_size), torch.nan)


def graphs_of(drafter, table: torch.Tensor) -> DraftGraphs:
    """Graphs of what the drafter does on a GPU."""
    return DraftGraphs(drafter._propose_each, SIZES, table, drafter.gamma + 2, room_of(drafter), record)


def test_a_replay_gives_the_drafters_drafts(drafter):
    table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    table[1:] = 1 + torch.randperm(REQUESTS * CONTEXT).view(-1, CONTEXT)
    graphs = graphs_of(drafter, table)
    kinds = [(), ("decided",), ("top_ks", "top_ps", "decided"), ("top_ps",), ("top_ks", "min_ps", "decided")]
    for step, count in enumerate((7, 1, 3, 2, 5, 1, 4, 6)):  # leftovers of a larger batch must not matter
        batch = batch_of(count, table, drafter.gamma, torch.rand(count) < 0.7, *kinds[step % len(kinds)])
        before = [pool.clone() for pair in drafter.pools for pool in pair]
        tokens, probs, confidence = drafter._propose(batch)
        after = [pool.clone() for pair in drafter.pools for pool in pair]
        for pool, old in zip((pool for pair in drafter.pools for pool in pair), before, strict=True):
            pool.copy_(old)
        assert graphs.fits(count, table)
        masked = step % 3 == 1
        mask = torch.rand(count) < 0.5 if masked else torch.ones(count, dtype=torch.bool)
        replayed = graphs.propose(replace(batch, keys=batch.keys[:0], draft_mask=mask if masked else None))
        assert torch.equal(replayed.tokens, tokens)
        assert torch.equal(replayed.lens, mask * drafter.gamma)
        assert replayed.drafting == count
        assert (replayed.probs is None) == (not batch.wants_probs)
        if replayed.probs is not None and probs is not None:
            assert_near(replayed.probs[:count][~batch.decided], probs[~batch.decided], TERMS)
        assert_near(replayed.confidence, confidence, TERMS)
        for pool, wanted in zip((pool for pair in drafter.pools for pool in pair), after, strict=True):
            assert_near(pool[1:], wanted[1:], TERMS)


def test_rules_are_copied_only_when_their_tensors_change(drafter):
    table = 1 + torch.randperm((REQUESTS + 1) * CONTEXT).view(-1, CONTEXT).int() % (REQUESTS * CONTEXT)
    graphs = graphs_of(drafter, table)
    batch = batch_of(3, table, drafter.gamma, torch.ones(3, dtype=torch.bool), "top_ks", "decided")
    one = replace(batch, top_ks=torch.ones(3, dtype=torch.int64))
    greedy = drafter._propose(replace(one, temperatures=torch.zeros(3), all_greedy=True))[0]
    for given, expected in ((batch, drafter._propose(batch)[0]), (one, greedy), (one, greedy)):
        assert torch.equal(graphs.propose(given).tokens, expected)
    one.top_ks.fill_(1 << 30)  # the change shows if rules are read again
    assert torch.equal(graphs.propose(one).tokens, greedy)


def test_batches_without_a_graph_do_not_fit(drafter):
    table = torch.zeros(REQUESTS + 2, CONTEXT, dtype=torch.int32)
    graphs = graphs_of(drafter, table)
    assert graphs.fits(REQUESTS, table)
    assert not graphs.fits(REQUESTS + 1, table)
    assert not graphs.fits(3, table.clone())


@pytest.mark.parametrize("dim", [80, 96, 256, 512])
def test_on_a_gpu_heads_of_any_published_size_are_drafted_by_graphs(dim, monkeypatch):
    made = make_drafter(replace(CONFIGS["dspark"], head_dim=dim))
    monkeypatch.setattr(cuda, "fits", lambda *_: True)
    assert made.reserve_probs(4) is not None


def test_on_a_cpu_no_graph_is_captured(drafter):
    assert drafter.reserve_probs(SIZES[-1]) is None
