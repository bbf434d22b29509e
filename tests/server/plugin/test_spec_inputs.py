"""Flattening a ragged verify: against a loop over requests and tokens."""

import torch

from outrider.server.plugin.decode.flatten import flatten


def test_flatten_equals_a_loop_over_requests():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        requests, gamma, context = int(torch.randint(1, 9, (), generator=generator)), 7, 40
        page_table = torch.randperm(12 * context, generator=generator).view(12, context).to(torch.int32)
        rows = torch.randperm(12, generator=generator)[:requests]
        seq_lens = torch.randint(0, context - gamma - 1, (requests,), generator=generator)
        verify_lens = torch.randint(0, gamma + 1, (requests,), generator=generator)
        anchors = torch.randint(0, 1000, (requests,), generator=generator)
        drafts = torch.randint(0, 1000, (requests, gamma), generator=generator)
        flat = flatten(anchors, drafts, verify_lens, seq_lens, page_table, rows)
        expected = []
        for r in range(requests):
            tokens = [int(anchors[r]), *drafts[r].tolist()]
            for k in range(int(verify_lens[r]) + 1):
                position = int(seq_lens[r]) + k
                expected.append((tokens[k], position, int(page_table[rows[r], position]), r, k))
        got = zip(
            *(x.tolist() for x in (flat.input_ids, flat.positions, flat.slots, flat.request, flat.step)), strict=True
        )
        assert list(got) == expected
        assert flat.qo_indptr.tolist() == [0, *(verify_lens + 1).cumsum(0).tolist()]
