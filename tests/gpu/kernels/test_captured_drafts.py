"""Drafts by graphs, with keys, prompt lookup and the choice inside, equal drafts without."""

from dataclasses import asdict, replace

import pytest
import torch
from gpu_device import INTERPRETED, ON, differing, triton
from graphs_as_functions import record

from outrider.drafters.base import Draft, DraftBatch
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import BlockModel
from outrider.drafters.graphs import DraftGraphs
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.kernels.noise import draft_keys

SIZES, CONTEXT, GAMMA, WORDS = (1, 8, 32), 64, 6, 40
CONFIG = BlockConfig(
    kind="dspark", gamma=4, vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=16, num_target_layers=2, target_layers=(0,), mask_token_id=7, rope_theta=10000.0,
    max_positions=256, markov_rank=8, confidence_head=True,
)  # fmt: skip


class EachDrafter(BlockDrafter):
    """Drafts as on a GPU, also where Triton interprets."""

    def propose(self, batch: DraftBatch) -> Draft:
        return self._propose_each(batch)


def drafter() -> LookupFirst:
    torch.manual_seed(0)
    with ON:
        model = BlockModel(CONFIG, None)
        for weights in model.parameters():
            torch.nn.init.normal_(weights, std=0.3)
        rows = torch.randn(WORDS, CONFIG.hidden_size)
    made = LookupFirst(
        NgramDrafter(GAMMA, device=ON), EachDrafter(model, embedding=rows, head=rows), expected_run_length=1.7
    )
    made.allocate((SIZES[-1] + 1) * CONTEXT + 1)
    made.lookup.history.tokens.copy_(torch.randint(WORDS, made.lookup.history.tokens.shape))
    for keys, values in made.model.pools:
        keys.normal_()
        values.normal_()
    return made


def batch_of(kind: str, count: int, table: torch.Tensor) -> DraftBatch:
    """Half of the texts repeat a few words, so that they are looked up."""
    greedy = torch.full((count,), kind == "greedy") if kind != "mixed" else torch.rand(count) < 0.4
    seeded = torch.full((count,), kind == "seeded") if kind != "mixed" else (torch.rand(count) < 0.5) & ~greedy
    seeds, seq_lens = torch.randint(1 << 40, (count,)), torch.randint(20, CONTEXT - 8, (count,))
    batch = DraftBatch(
        anchors=torch.randint(WORDS, (count,)),
        seq_lens=seq_lens,
        page_table=table,
        rows=1 + torch.randperm(SIZES[-1])[:count],
        temperatures=torch.where(greedy, 0.0, 0.8),
        keys=torch.zeros(count, GAMMA, dtype=torch.int64),
        seeds=seeds,
        seeded=seeded,
        decided=greedy | seeded,
        top_ks=torch.where(greedy, 1, 20),
        top_ps=torch.full((count,), 0.9),
        wants_probs=not bool((greedy | seeded).all()),
        all_greedy=False,
        longest=CONTEXT,
    )
    moved = {name: value.to(ON) for name, value in asdict(batch).items() if isinstance(value, torch.Tensor)}
    return replace(batch, **moved | {"page_table": table})


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["greedy", "sampled", "seeded", "mixed"])
def test_a_replay_equals_the_drafts_without_a_graph(kind: str) -> None:
    table = torch.zeros(SIZES[-1] + 1, CONTEXT, dtype=torch.int32)
    table[1:] = 1 + torch.randperm(SIZES[-1] * CONTEXT).view(-1, CONTEXT).int()
    table = table.to(ON)
    with triton():
        made = drafter()
        repeated = torch.arange(CONTEXT, device=ON) % 5
        for row in range(1, SIZES[-1], 2):
            made.lookup.history.tokens[table[row].long()] = repeated.to(made.lookup.history.tokens.dtype)
        room = torch.full((SIZES[-1], CONFIG.gamma, WORDS), torch.nan, device=ON)
        graphs = DraftGraphs(made.propose, SIZES, table, GAMMA, room, record if INTERPRETED else None)
        for count in (32, 1, 8, 5):  # leftovers of a larger batch must not matter
            batch = batch_of(kind, count, table)
            if kind in ("greedy", "mixed"):  # some anchors go on with what is repeated
                batch.anchors.copy_(batch.seq_lens % 5)
            keys = draft_keys(batch.seeds, batch.seeded, batch.seq_lens, GAMMA)
            expected = made.propose(replace(batch, keys=keys))
            found = graphs.propose(batch)
            names = "tokens", "lens", "looked_up"
            assert differing([getattr(found, name) for name in names], [getattr(expected, name) for name in names]) == 0
            torch.testing.assert_close(found.confidence, expected.confidence, rtol=1e-4, atol=1e-6)  # of other batches
            assert found.drafting == count
            assert (found.probs is None) == (not batch.wants_probs)
            if found.probs is not None and expected.probs is not None:
                assert found.probs is room
                read = ~batch.decided & ~found.looked_up
                assert differing(found.points, found.looked_up) == 0
                torch.testing.assert_close(room[:count][read], expected.probs[read], rtol=1e-4, atol=1e-6)
