"""A block's tokens, q and confidences by Triton, against the drafter's own torch."""

import copy
from types import SimpleNamespace

import pytest
import torch
from batches import some_rules
from gpu_device import INTERPRETED, ON, TYPES, differing, examples, moved, triton
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.base import DraftBatch
from outrider.drafters.block import sampling
from outrider.drafters.block.heads import SEQUENTIAL_HEADS


def check(requests, gamma, width, head, named, wants_probs, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    tokens, d = 3 * width, 24
    anchors = torch.randint(tokens, (requests,), generator=generator)
    keys = torch.randint(2**62, (requests, gamma), generator=generator)
    rules = some_rules(requests, width, generator)
    vocab = torch.randperm(tokens, generator=generator)[:width].sort().values if named else None
    logits = (torch.randn(requests, gamma, width, generator=generator) * 3).to(dtype)
    hidden = torch.randn(requests, gamma, d, generator=generator).to(dtype)
    markov = None
    if head is not None:
        shape = SimpleNamespace(vocab_size=tokens, hidden_size=d, markov_rank=20, logit_size=width)
        markov = SEQUENTIAL_HEADS[head](shape).to(dtype).requires_grad_(False)
        markov.w2.weight *= 20

    def run(markov, anchors, keys, rules, vocab, logits, hidden):
        rows = torch.zeros_like(anchors)
        empty = rows.new_zeros(1, 1, dtype=torch.int32)
        batch = DraftBatch(anchors, rows, empty, rows, keys=keys, wants_probs=wants_probs, **rules._asdict())
        if markov is None:
            return sampling.sample_parallel(logits, batch, vocab=vocab)
        return sampling.sample_block(logits, hidden, batch, vocab=vocab, markov=markov, confidence=None)

    given = anchors, keys, rules, vocab
    expected = run(copy.deepcopy(markov).float() if markov else None, *given, logits.float(), hidden.float())
    with triton():
        arrays = moved((*given, logits, hidden))
        results = run(markov.to(ON) if markov else None, *arrays)
    results = [None if x is None else x.cpu() for x in results]
    # Torch computes the states of the other heads in the drafter's type.
    exact = dtype == torch.float32 or head in (None, "vanilla")
    near = {"rtol": 1e-4, "atol": 1e-7} if exact else {"rtol": 5e-2, "atol": 5e-3}
    if exact:
        assert differing(results[0], expected[0]) == 0
    torch.testing.assert_close(results[2][:, 0], expected[2][:, 0], **near)
    assert (results[1] is not None) == wants_probs
    random = rules.temperatures > 0
    if wants_probs and random.any() and exact:
        torch.testing.assert_close(results[1][random], expected[1][random], **near)
        drawn = results[0] if vocab is None else torch.searchsorted(vocab, results[0])
        assert bool((results[1].gather(2, drawn[:, :, None]) > 0).all())


@examples()
@given(
    requests=st.sampled_from([1, 5]),
    gamma=st.sampled_from([1, 3]),
    width=st.sampled_from([48, 1100]),
    head=st.sampled_from([None, *SEQUENTIAL_HEADS]),
    named=st.booleans(),
    wants_probs=st.booleans(),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**31),
)
def test_a_block_as_by_torch(**how):
    check(**how)


@pytest.mark.skipif(INTERPRETED, reason="takes Triton's interpreter too long")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head", [None, "vanilla"])
def test_a_block_of_a_server_as_by_torch(head, dtype):
    check(24, 7, 32_000, head, False, True, dtype, 0)
