"""Logprobs are computed only for the requests that want them."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from outrider.kernels.ragged import FlatVerify
from outrider.server.plugin.decode import logprobs

V, GAMMA = 40, 3


def case(asking: list[bool], seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    count = len(asking)
    lens = torch.randint(GAMMA + 1, (count,), generator=generator)
    indptr = torch.nn.functional.pad((lens + 1).cumsum(0), (1, 0))
    nothing = torch.zeros(int(indptr[-1]) + 2, dtype=torch.int64)  # with padding
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(return_logprob=each) for each in asking],
        sampling_info=SimpleNamespace(temperatures=0.5 + torch.rand(count, 1, generator=generator)),
        top_logprobs_nums=[(2 + place if each else 0) for place, each in enumerate(asking)],
        token_ids_logprobs=[([3, place] if each and place else None) for place, each in enumerate(asking)],
    )
    logits = torch.randn(len(nothing), V, generator=generator)
    tokens = torch.randint(V, (count, GAMMA + 1), generator=generator)
    return batch, FlatVerify(nothing, nothing, nothing, indptr, nothing, nothing), logits, tokens


@pytest.mark.parametrize("asking", [[True], [False, True, False, True, False], [True] * 4])
def test_a_step_has_the_requested_logprobs(asking):
    batch, flat, logits, tokens = case(asking)
    output = SimpleNamespace(next_token_logits=logits)
    softmax, seen = torch.log_softmax, []
    with mock.patch.object(torch, "log_softmax", side_effect=lambda x, dim: (seen.append(len(x)), softmax(x, dim))[1]):
        logprobs.write_step_logprobs(output, batch, flat, tokens)
    assert seen == [sum(asking) * (GAMMA + 1)]
    for place, asks in enumerate(asking):
        begin, end = flat.qo_indptr[place : place + 2].tolist()
        for k in range(end - begin):
            at = place * (GAMMA + 1) + k
            if not asks:
                assert output.next_token_logprobs[place, k] == 0
                assert len(output.next_token_top_logprobs_val[at]) == 0
                continue
            row = (logits[begin + k].float() / batch.sampling_info.temperatures[place]).log_softmax(-1)
            torch.testing.assert_close(output.next_token_logprobs[place, k], row[tokens[place, k]])
            best = row.topk(2 + place)
            torch.testing.assert_close(output.next_token_top_logprobs_val[at], best.values)
            assert output.next_token_top_logprobs_idx[at].tolist() == best.indices.tolist()
            if place:
                torch.testing.assert_close(output.next_token_token_ids_logprobs_val[at], row[[3, place]])


def test_a_prefill_has_the_requested_logprobs():
    batch, _, logits, tokens = case([False, True, True])
    output = SimpleNamespace()
    logprobs.write_logprobs(output, batch, logits[:3], tokens[:, 0])
    expected = (logits[:3].float() / batch.sampling_info.temperatures).log_softmax(-1)
    expected = expected.gather(1, tokens[:, :1])[:, 0]
    assert output.next_token_logprobs[0] == 0
    torch.testing.assert_close(output.next_token_logprobs[1:], expected[1:])
    assert [len(each) for each in output.next_token_top_logprobs_val] == [0, 3, 4]
