"""Prompt lookup by Triton compared with plain torch."""

from unittest import mock

import pytest
import torch
from gpu_device import INTERPRETED, ON, differing, examples, moved, triton
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters import ngram
from outrider.drafters.base import Draft, DraftBatch
from outrider.drafters.slot_tokens import SlotTokens
from outrider.kernels.cpu import native as cpu


def texts(requests: int, context: int, words: int, seed: int) -> tuple[torch.Tensor, DraftBatch]:
    """The cache's tokens, and requests with repetitive texts of few words."""
    generator = torch.Generator().manual_seed(seed)
    slots = (requests + 1) * context + 1
    history = torch.randint(words, (slots,), generator=generator, dtype=torch.int32)
    table = 1 + torch.randperm(slots - 1, generator=generator)[: (requests + 1) * context].view(-1, context).int()
    lens = torch.randint(context - 8, (requests,), generator=generator)
    lens[0] = 0  # the anchor alone
    batch = DraftBatch(
        anchors=torch.randint(words, (requests,), generator=generator),
        seq_lens=lens,
        page_table=table,
        rows=torch.randperm(requests + 1, generator=generator)[:requests],
        temperatures=torch.rand(requests, generator=generator).round(),
        keys=torch.zeros(requests, 1, dtype=torch.int64),
        longest=context,
    )
    return history, batch


def drafted(history: torch.Tensor, batch: DraftBatch, device: torch.device, shape: tuple[int, int, int]) -> Draft:
    gamma, longest, shortest = shape
    with mock.patch.multiple(ngram, LONGEST_MATCH=longest, SHORTEST_MATCH=shortest):
        drafter = ngram.NgramDrafter(gamma, device)
        drafter.history = SlotTokens(1)
        drafter.history.tokens = history
        return drafter.propose(batch)


def check(requests: int, context: int, words: int, shape: tuple[int, int, int], seed: int) -> int:
    """shape: tokens of a draft, longest and shortest match. Returns the number of requests with a match."""
    history, batch = texts(requests, context, words, seed)
    with mock.patch.object(cpu, "available", return_value=False):
        expected = drafted(history, batch, torch.device("cpu"), shape)
    names = "anchors", "seq_lens", "page_table", "rows", "temperatures", "keys"
    there = DraftBatch(*(moved(getattr(batch, name)) for name in names), longest=context)
    with triton():
        draft = drafted(moved(history), there, ON, shape)
    assert differing(draft.lens, expected.lens) == 0
    drafts = expected.lens > 0
    assert differing(draft.tokens[drafts], expected.tokens[drafts]) == 0
    assert bool((draft.tokens >= 0).all())
    torch.testing.assert_close(draft.confidence.cpu(), expected.confidence, rtol=1e-4, atol=1e-6)
    return int(drafts.sum())


@examples(12)
@given(
    requests=st.sampled_from([1, 4]),
    context=st.sampled_from([16, 90, 1100]),
    words=st.sampled_from([1, 2, 5, 40]),
    shape=st.sampled_from([(4, 32, 2), (7, 3, 1), (1, 2, 2), (10, 8, 3)]),
    seed=st.integers(0, 2**31),
)
def test_matches_equal_torch(requests, context, words, shape, seed):
    check(requests, context, words, shape, seed)


def test_there_are_matches_and_texts_without():
    assert 0 < check(16, 90, 9, (7, 32, 2), 2) < 16


@pytest.mark.skipif(INTERPRETED, reason="takes Triton's interpreter too long")
def test_long_texts():
    assert check(64, 16_384, 200, (7, 32, 2), 0) > 32
