"""The drafter's view of a prefill."""

from types import SimpleNamespace

import torch

from outrider.server.plugin.decode.requests import prefilled_chunks, transferred_tokens


def test_chunks_of_a_batch():
    table = torch.zeros(8, 16, dtype=torch.int32)
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([5, 2]), seq_lens=torch.tensor([9, 7]), prefix_lens=[6, 0], extend_lens=[3, 7]
    )
    shown = prefilled_chunks(batch, table)
    assert shown.page_table is table
    assert (shown.rows.tolist(), shown.seq_lens.tolist(), shown.counts, shown.longest) == ([5, 2], [9, 7], [3, 7], 9)


def test_texts_of_requests_that_another_server_has_read() -> None:
    """The last token is the anchor, which has no slot yet."""
    table = torch.arange(48, dtype=torch.int32).view(3, 16)
    requests = [
        SimpleNamespace(origin_input_ids=[7, 8, 9], output_ids=[4]),
        SimpleNamespace(origin_input_ids=[5], output_ids=[6, 3]),
    ]
    batch = SimpleNamespace(req_pool_indices=torch.tensor([2, 1]), seq_lens=torch.tensor([3, 2]), reqs=requests)
    slots, tokens = transferred_tokens(batch, table)
    assert slots.tolist() == [32, 33, 34, 16, 17]
    assert tokens.tolist() == [7, 8, 9, 5, 6]
