"""Prompt lookup: matches, confidence, and text after radix-cache hits."""

import pytest
import torch
from shown_texts import show

from outrider.drafters.base import DraftBatch, Features
from outrider.drafters.ngram import NgramDrafter
from outrider.kernels.cpu import native

CONTEXT = 96


def propose(texts, gamma=4):
    """Draft after each of `texts`, ended by its anchor."""
    drafter = NgramDrafter(gamma)
    return drafter.propose(show(drafter, texts, CONTEXT, temperatures=torch.arange(len(texts)) % 3 / 2))


def expected(text, gamma=4, longest=32, shortest=2):
    """The rule in plain code: the latest earlier occurrence of the longest matching suffix, continued."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:] and len(text) > n:
                out = list(text)
                for k in range(gamma):
                    out.append(out[start + n + k])
                return out[len(text) :]
    return None


def some_texts(count, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, CONTEXT + 1, (count,), generator=generator).tolist()
    texts = [torch.randint(0, tokens, (length,), generator=generator).tolist() for length in lengths]
    for text in texts[::3]:
        period = int(torch.randint(1, CONTEXT // 2, (), generator=generator))
        text[period:] = [text[k % period] for k in range(period, len(text))]
    return texts


def test_matches_equal_a_plain_search():
    texts = some_texts(200, 4, seed=3)
    draft = propose(texts)
    assert any(n == 0 for n in draft.lens.tolist())
    for row, text in enumerate(texts):
        want = expected(text)
        assert int(draft.lens[row]) == (0 if want is None else 4), text
        if want is not None:
            assert draft.tokens[row].tolist() == want, text


def test_compiled_and_plain_search_find_the_same(monkeypatch):
    if not native.available():
        pytest.skip("no compiled kernels here")
    texts = some_texts(100, 5, seed=4)
    for gamma in (1, 7):
        ours = propose(texts, gamma)
        with monkeypatch.context() as plainly:
            plainly.setattr(native, "available", lambda: False)
            plain = propose(texts, gamma)
        assert torch.equal(ours.lens, plain.lens)
        matched = plain.lens > 0
        assert torch.equal(ours.tokens[matched], plain.tokens[matched])
        torch.testing.assert_close(ours.confidence, plain.confidence)


def test_longer_and_consistent_matches_have_more_confidence():
    def first(text):
        return float(propose([text]).confidence[0, 0])

    text = list(range(40))
    by_length = [first([*text, *text[:length]]) for length in (2, 8, 9, 20, 32, 35)]
    assert by_length[:5] == sorted(set(by_length[:5]))
    assert by_length[5] == by_length[4]  # longer matches are not distinguished
    once = first([1, 2, 3, 9, 1, 2])
    assert first([1, 2, 3, 9, 1, 2, 3, 9, 1, 2]) > once > first([1, 2, 5, 9, 1, 2, 3, 9, 1, 2])
    assert once > first([1, 2, 3, 2, 4, 1, 2])  # elsewhere another token followed


def test_confidence_is_a_probability_and_zero_without_a_draft():
    draft = propose([[1, 2, 3, 1, 2], [5, 6, 7]])
    assert 0 < float(draft.confidence[0, 0]) < 1
    assert draft.confidence[1].tolist() == [0.0] * 4


def test_a_prefix_from_the_radix_cache_brings_its_text():
    """The drafter never observes the second request's prefix; its page table points at the first one's slots."""
    drafter = NgramDrafter(4)
    drafter.allocate(2 * CONTEXT)
    table = torch.arange(2 * CONTEXT).view(2, CONTEXT)
    prefix = torch.tensor([5, 6, 7, 8, 9, 1])
    drafter.observe(Features(None, prefix, torch.arange(6), table[0, :6]))
    table[1, :6] = table[0, :6]
    slots = torch.tensor([2, 5])
    drafter.observe(Features(None, slots, torch.arange(6, 8), table[1, 6:8]))
    draft = drafter.propose(
        DraftBatch(
            anchors=torch.tensor([6]), seq_lens=torch.tensor([8]), page_table=table.to(torch.int32),
            rows=torch.tensor([1]), temperatures=torch.zeros(1), keys=torch.zeros(1, 4, dtype=torch.int64),
        )
    )  # fmt: skip
    assert draft.tokens[0].tolist() == [7, 8, 9, 1]
