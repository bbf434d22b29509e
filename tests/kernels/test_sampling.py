import pytest
import torch

from outrider.kernels.sampling import (
    BLOCK,
    HEAD,
    inverse_cdf,
    reference_inverse_cdf,
    reference_target_probs,
    target_probs,
)

ALL = 2**30


def rules(rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda values: torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]  # noqa: E731
    return (
        pick([0.0, 0.3, 1.0, 1.7]),
        pick([1, 2, 50, HEAD, HEAD + 1, ALL]),
        pick([0.01, 0.5, 0.9, 1.0]),
        pick([0.0, 0.02, 0.5, 1.0]),
    )


@pytest.mark.parametrize("vocab", [17, 3000, 2 * HEAD])
@pytest.mark.parametrize("ties", [False, True])
def test_target_probs_equals_reference(vocab, ties):
    logits = torch.randn(300, vocab, generator=torch.Generator().manual_seed(1)) * 3
    if ties:
        logits = logits.round()
    logits[:, vocab // 2] = -torch.inf
    settings = rules(300)
    got, expected = target_probs(logits, *settings), reference_target_probs(logits, *settings)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(got.sum(-1), torch.ones(300))


def test_flat_distribution_needs_more_than_the_head():
    logits = torch.randn(4, 4 * HEAD, generator=torch.Generator().manual_seed(2)) * 1e-3
    settings = (
        torch.ones(4),
        torch.full((4,), ALL),
        torch.tensor([0.9, 0.1, 1.0, 0.5]),
        torch.tensor([0.0, 0, 0.999, 0]),
    )
    got = target_probs(logits, *settings)
    assert torch.equal(got > 0, reference_target_probs(logits, *settings) > 0)
    assert int((got[0] > 0).sum()) > HEAD


def test_no_filter_is_softmax_and_rules_may_be_missing():
    logits = torch.randn(5, 100, dtype=torch.bfloat16)
    off = torch.full((5,), ALL), torch.ones(5), torch.zeros(5)
    expected = (logits.float() / 0.7).softmax(-1)
    assert torch.equal(target_probs(logits, torch.full((5,), 0.7), *off), expected)
    assert torch.equal(target_probs(logits, torch.full((5,), 0.7)), expected)


def test_rules_need_one_value_per_row():
    with pytest.raises(ValueError, match="one value per row"):
        target_probs(torch.zeros(3, 8), torch.ones(2))


@pytest.mark.parametrize("vocab", [1, 5, BLOCK, 3 * BLOCK + 1])
def test_inverse_cdf_equals_reference(vocab):
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(400, vocab, generator=generator)
    weights[torch.rand(400, vocab, generator=generator) < 0.7] = 0
    weights[:, vocab // 2] += 1e-6
    uniforms = torch.rand(400, generator=generator)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-24])
    got = inverse_cdf(weights, uniforms)
    assert torch.equal(got, reference_inverse_cdf(weights, uniforms))
    assert bool((weights.gather(1, got[:, None]) > 0).all())


def test_inverse_cdf_never_returns_a_token_of_weight_zero():
    extremes = torch.tensor([0.0, 2**-24, 0.5, 1 - 2**-24])
    for scale in (1e-38, 1e-20, 1.0):
        for place in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK - 1):
            weights = torch.zeros(4, 3 * BLOCK)
            weights[:, place] = scale
            assert inverse_cdf(weights, extremes).tolist() == [place] * 4
