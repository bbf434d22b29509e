"""Acceptance: fast against reference, and both against the distribution to preserve."""

import pytest
import torch
from batches import verification
from references import reference_accept, reference_target_probs
from scipy.stats import chi2

from outrider.kernels.acceptance import Verification, accept, draw_each, kept_drafts
from outrider.kernels.noise import gumbel_argmax, torch_gumbel_argmax

GAMMA = 4


def simplex(*shape: int, generator: torch.Generator, sharp: float = 2.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * sharp).softmax(-1)


def keys(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2**62, (count,), generator=generator)


def verify_batch(seed: int, requests: int, vocab_size: int, q_kind: str):
    """Arguments of a verification: tokens, verify_lens and qo_indptr; the rest by name."""
    arrays, keywords = verification(requests, GAMMA, vocab_size, q_kind, torch.float32, seed)
    tokens, verify_lens, qo_indptr, request, logits, rules = arrays
    total = int(qo_indptr[-1])
    probs = reference_target_probs(logits, *rules.of(request))[:total]
    wanted = torch_gumbel_argmax(probs, keywords.pop("row_keys")[:total])
    decided = keywords["decided"] | (rules.temperatures <= 0)
    if keywords["draft_probs"] is not None:
        keywords["draft_probs"][decided] = torch.nan
    return (tokens, verify_lens, qo_indptr.int()), keywords | {"wanted": wanted, "probs": probs, "decided": decided}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("by_block", [True, False], ids=["block", "token"])
@pytest.mark.parametrize("q_kind", ["full", "truncated", "point mass"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_reference(seed, q_kind, by_block):
    arrays, keywords = verify_batch(seed, 150, 24, q_kind)
    batch = Verification(*arrays, **keywords, by_block=by_block)
    lens, out = accept(batch)
    expected_lens, expected = reference_accept(batch)
    assert torch.equal(lens, expected_lens)
    assert torch.equal(out, expected)
    rows = arrays[2][:-1].long() + lens - 1
    finals = out.gather(1, lens[:, None] - 1)
    assert bool((keywords["probs"][rows].gather(1, finals) > 0).all())
    on_a_device, free = batch._replace(tokens=batch.tokens.where(batch.tokens < 24, 0)), ~keywords["decided"]
    kept, scale = kept_drafts(on_a_device)
    assert torch.equal(kept[free], lens[free] - 1)
    assert torch.equal(draw_each(on_a_device, kept, scale)[free], out.gather(1, kept[:, None])[free, 0])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seed", range(3))
def test_decided_requests_need_only_the_wanted_tokens(seed):
    arrays, keywords = verify_batch(seed, 60, 24, "point mass")
    agree = torch.rand(arrays[0].shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    rows = arrays[2][:-1, None].long() + torch.arange(GAMMA).clamp(max=arrays[1][:, None])
    tokens = keywords["wanted"][rows].where(agree, arrays[0])
    lens, out = accept(Verification(tokens, *arrays[1:], wanted=keywords["wanted"]))
    expected_lens, expected = reference_accept(Verification(tokens, *arrays[1:], wanted=keywords["wanted"]))
    assert lens.unique().tolist() == list(range(1, GAMMA + 2))
    assert torch.equal(lens, expected_lens)
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("compiled")
def test_wanted_rows_must_match_the_lengths():
    arrays, keywords = verify_batch(0, 5, 24, "point mass")
    with pytest.raises((ValueError, RuntimeError), match=r"verify_lens \+ 1 rows"):
        accept(Verification(arrays[0], arrays[1] + 1, arrays[2], wanted=keywords["wanted"]))


def test_without_drafts_every_token_comes_from_p():
    final_keys = keys(7, torch.Generator().manual_seed(0))
    probs = simplex(7, 9, generator=torch.Generator().manual_seed(1))
    none = torch.empty(7, 0, dtype=torch.int64)
    lens, out = accept(
        Verification(
            none, torch.zeros(7).long(), torch.arange(8), uniforms=none.double(), final_keys=final_keys, probs=probs
        )
    )
    assert lens.tolist() == [1] * 7
    assert torch.equal(out[:, 0], gumbel_argmax(probs, final_keys))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("by_block", [True, False], ids=["block", "token"])
def test_vanishing_residual_falls_back_to_p(by_block):
    """The draft is rejected although p lies below q only by rounding."""
    count = 20
    p, final_keys = torch.tensor([[0.49999997, 0.5, 0.0]]), keys(count, torch.Generator().manual_seed(0))
    given = Verification(
        torch.zeros(count, 1, dtype=torch.int64), torch.ones(count).long(), torch.arange(count + 1) * 2,
        uniforms=torch.full((count, 1), 1 - 2.0**-53, dtype=torch.float64), final_keys=final_keys,
        probs=p.repeat(2 * count, 1), draft_probs=torch.tensor([0.5, 0.5, 0.0]).repeat(count, 1, 1), by_block=by_block,
    )  # fmt: skip
    for decide in (accept, reference_accept):
        lens, out = decide(given)
        assert lens.tolist() == [1] * count
        assert torch.equal(out[:, 0], gumbel_argmax(p.expand(count, 3).contiguous(), final_keys))


def test_mistakes_are_explained():
    arrays, keywords = verify_batch(0, 5, 24, "truncated")
    with pytest.raises(ValueError, match="must pass its vocab"):
        accept(Verification(*arrays, **(keywords | {"vocab": None})))
    with pytest.raises(ValueError, match="decided requests need wanted"):
        accept(Verification(*arrays, **(keywords | {"wanted": None, "decided": torch.ones(5, dtype=torch.bool)})))
    with pytest.raises(ValueError, match=r"verify_lens \+ 1 rows"):
        accept(Verification(arrays[0], arrays[1] + 1, arrays[2], **keywords))
    with pytest.raises(ValueError, match="which are missing"):
        accept(Verification(*arrays, **(keywords | {"uniforms": None})))


# With 400,000 samples a shift of 1 % of the mass raises the statistic far above the threshold, which a correct acceptor
# crosses once in 10^6 runs.

SAMPLES, TARGET_VOCAB = 400_000, 8


def chi_square_ok(counts: torch.Tensor, p: torch.Tensor) -> bool:
    seen = p > 0
    assert int(counts[~seen].sum()) == 0, "a token of probability 0 came out"
    expected = p[seen].double() * counts.sum()
    statistic = ((counts[seen] - expected) ** 2 / expected).sum()
    return bool(statistic < chi2.ppf(1 - 1e-6, int(seen.sum()) - 1))


def first_two(q_kind: str, seed: int, acceptor=accept):
    """Counts and distributions of the first token, and of the second where the first draft was kept."""
    generator = torch.Generator().manual_seed(seed)
    p = simplex(2, TARGET_VOCAB, generator=generator, sharp=1.0)
    p[0, 3] = 0
    p /= p.sum(-1, keepdim=True)
    vocab = torch.tensor([0, 2, 3, 6]) if q_kind == "truncated" else None
    q = simplex(2, TARGET_VOCAB if vocab is None else len(vocab), generator=generator, sharp=1.0)
    if q_kind == "point mass":
        tokens = torch.tensor([[1, 5]]).expand(SAMPLES, 2)
    else:
        drawn = gumbel_argmax(q.repeat(SAMPLES, 1), keys(2 * SAMPLES, generator)).view(SAMPLES, 2)
        tokens = drawn if vocab is None else vocab[drawn]
    # Row 3r + k of the target: p_0 after the anchor, p_1 after one kept token, p_0 again after two.
    probs = torch.cat([p, p[:1]]).repeat(SAMPLES, 1)
    lens, out = acceptor(
        Verification(
            tokens, torch.full((SAMPLES,), 2), torch.arange(SAMPLES + 1) * 3,
            uniforms=torch.rand(SAMPLES, 2, generator=generator, dtype=torch.float64),
            final_keys=keys(SAMPLES, generator), probs=probs,
            draft_probs=None if q_kind == "point mass" else q.expand(SAMPLES, 2, -1).contiguous(), vocab=vocab,
        )
    )  # fmt: skip
    count = lambda k: torch.bincount(out[lens > k, k], minlength=TARGET_VOCAB).double()  # noqa: E731
    return [(count(0), p[0]), (count(1), p[1]), (count(2), p[0])]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("q_kind", ["full", "truncated", "point mass"])
@pytest.mark.parametrize("seed", [1, 2])
def test_output_is_distributed_as_p(q_kind, seed):
    for counts, p in first_two(q_kind, seed):
        assert chi_square_ok(counts, p)


def test_partly_verified_blocks_are_distributed_as_p():
    p = torch.tensor([0.1, 0.2, 0.7])
    generator = torch.Generator().manual_seed(3)
    verify_lens = torch.randint(0, 2, (SAMPLES,), generator=generator)
    qo_indptr = torch.cat([torch.zeros(1).long(), (verify_lens + 1).cumsum(0)])
    q = torch.tensor([0.6, 0.3, 0.1])
    tokens = gumbel_argmax(q.expand(SAMPLES, 3), keys(SAMPLES, generator))[:, None]
    _, out = accept(
        Verification(
            tokens, verify_lens, qo_indptr, uniforms=torch.rand(SAMPLES, 1, generator=generator, dtype=torch.float64),
            final_keys=keys(SAMPLES, generator), probs=p.repeat(int(qo_indptr[-1]), 1),
            draft_probs=q.expand(SAMPLES, 1, 3).contiguous(),
        )
    )  # fmt: skip
    assert chi_square_ok(torch.bincount(out[:, 0], minlength=3).double(), p)


def one_percent_too_willing(batch):
    """Keeps a draft in 1 % of the cases, whatever p."""
    return accept(batch._replace(uniforms=(batch.uniforms - 0.01).clamp(min=0)))


def replaced_from_p(batch):
    """Draws the replacement from p instead of the residual."""
    lens, out = accept(batch)
    final = gumbel_argmax(batch.probs[batch.qo_indptr[:-1] + lens - 1], batch.final_keys)
    return lens, out.scatter(1, lens[:, None] - 1, final[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("acceptor", [one_percent_too_willing, replaced_from_p])
@pytest.mark.parametrize("q_kind", ["full", "truncated", "point mass"])
def test_the_chi_square_test_has_power(acceptor, q_kind):
    assert not all(chi_square_ok(counts, p) for counts, p in first_two(q_kind, 1, acceptor))


def test_the_chi_square_test_detects_one_percent():
    p = torch.full((TARGET_VOCAB,), 1 / TARGET_VOCAB)
    shifted = p.clone()
    shifted[0] += 0.01
    shifted[1] -= 0.01
    some = keys(SAMPLES, torch.Generator().manual_seed(4))
    for weights, same in ((p, True), (shifted, False)):
        counts = torch.bincount(gumbel_argmax(weights.expand(SAMPLES, -1), some), minlength=TARGET_VOCAB)
        assert chi_square_ok(counts.double(), p) == same
