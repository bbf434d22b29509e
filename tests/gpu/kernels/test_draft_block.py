"""A block's tokens, q and confidences by Triton against the drafter's own torch."""

from types import SimpleNamespace

import pytest
import torch
from batches import some_rules
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters.base import DraftBatch
from outrider.drafters.block import sampling
from outrider.drafters.block.heads import SEQUENTIAL_HEADS
from outrider.kernels.cuda import draft_block  # noqa: F401 - registers the operator


@settings(max_examples=6)
@given(
    requests=st.sampled_from([1, 5]),
    gamma=st.sampled_from([1, 3]),
    width=st.sampled_from([48, 1100]),
    head=st.sampled_from([None, *SEQUENTIAL_HEADS]),
    named=st.booleans(),
    wants_probs=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_a_block_as_by_torch(requests, gamma, width, head, named, wants_probs, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    tokens, d = 3 * width, 24
    batch = DraftBatch(
        anchors=torch.randint(tokens, (requests,), generator=generator),
        seq_lens=torch.zeros(requests).long(),
        page_table=torch.zeros(1, 1).int(),
        rows=torch.zeros(requests).long(),
        keys=torch.randint(2**62, (requests, gamma), generator=generator),
        wants_probs=wants_probs,
        **some_rules(requests, width, generator)._asdict(),
    )
    vocab = torch.randperm(tokens, generator=generator)[:width].sort().values if named else None
    logits = (torch.randn(requests, gamma, width, generator=generator) * 3).to(dtype)
    hidden = torch.randn(requests, gamma, d, generator=generator).to(dtype)

    def run():
        if head is None:
            return sampling.sample_parallel(logits, batch, vocab=vocab)
        return sampling.sample_block(logits, hidden, batch, vocab=vocab, markov=markov, confidence=None)

    if head is not None:
        shape = SimpleNamespace(vocab_size=tokens, hidden_size=d, markov_rank=20, logit_size=width)
        markov = SEQUENTIAL_HEADS[head](shape).to(dtype).requires_grad_(False)
        markov.w2.weight *= 20
    expected = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling.cuda, "fits", lambda *_: True)
        found = run()
    near = {"rtol": 5e-2, "atol": 5e-3} if dtype == torch.float16 and head else {"rtol": 1e-4, "atol": 1e-7}
    if dtype == torch.float32 or head is None:  # else torch rounds the bias to float16
        assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[2][:, 0], expected[2][:, 0], **near)
    assert (found[1] is not None) == wants_probs
    random = batch.temperatures > 0
    if wants_probs and random.any() and (dtype == torch.float32 or head is None):
        torch.testing.assert_close(found[1][random], expected[1][random], **near)
        drawn = found[0] if vocab is None else torch.searchsorted(vocab, found[0])
        assert bool((found[1].gather(2, drawn[:, :, None]) > 0).all())
