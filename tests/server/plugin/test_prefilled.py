"""The drafter's view of a prefill."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from outrider.drafters.base import Prefilled
from outrider.drafters.dummy import FixedDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.wrappers import Initialised
from outrider.server.plugin.decode.worker import SpeculativeWorker


class Spy(FixedDrafter):
    shown: Prefilled

    def prefilled(self, chunks: Prefilled) -> None:
        self.shown = chunks


def test_a_model_learns_whose_chunks_were_read_behind_whatever_drafts_before_it():
    worker, spy = SpeculativeWorker.__new__(SpeculativeWorker), Spy(4, 99)
    worker.drafter = LookupFirst(NgramDrafter(6), Initialised(spy, 3), expected_run_length=1.0)
    table = torch.zeros(8, 16, dtype=torch.int32)
    worker.req_to_token_pool = SimpleNamespace(req_to_token=table)
    worker._show_prefilled(
        SimpleNamespace(
            req_pool_indices=torch.tensor([5, 2]), seq_lens=torch.tensor([9, 7]), prefix_lens=[6, 0], extend_lens=[3, 7]
        )
    )
    shown = spy.shown
    assert shown.page_table is table
    assert (shown.rows.tolist(), shown.seq_lens.tolist(), shown.counts, shown.longest) == ([5, 2], [9, 7], [3, 7], 9)


def test_without_a_drafter_nobody_is_told():
    worker = SpeculativeWorker.__new__(SpeculativeWorker)
    worker.drafter = None
    worker._show_prefilled(SimpleNamespace())
