"""Counter-based noise: uniform, and independent in every part of its key; drawn tokens follow p."""

import math

import pytest
import torch
from instruction_sets import EACH_SET
from scipy import stats

from outrider.kernels.cpu import native
from outrider.kernels.noise import (
    Purpose,
    choice_seed,
    gumbel_argmax,
    streams,
    substreams,
    torch_exponentials,
    torch_gumbel_argmax,
    torch_streams,
    uniforms,
)


def draw(seeds, positions, count=8, purpose=Purpose.ACCEPT):
    return uniforms(streams(torch.as_tensor(seeds), torch.as_tensor(positions), purpose), count)


def test_uniform_in_the_unit_interval():
    values = draw(torch.arange(5000), torch.arange(5000) % 17).flatten()
    assert float(values.min()) > 0.0
    assert float(values.max()) < 1.0
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3


def test_a_request_draws_the_same_whatever_the_batch():
    alone = draw([42], [100])
    batched = draw([1, 42, 7], [3, 100, 5])
    assert torch.equal(alone[0], batched[1])


def test_neighbouring_keys_are_independent():
    seeds, positions = torch.arange(20000), torch.full((20000,), 9)
    base = draw(seeds, positions)
    others = {
        "seed": draw(seeds + 1, positions),
        "position": draw(seeds, positions + 1),
        "purpose": draw(seeds, positions, purpose=Purpose.FINAL),
        "index": base.roll(1, 1),
        "choice": draw(torch.tensor([choice_seed(seed, 1) for seed in seeds.tolist()]), positions),
    }
    for name, other in others.items():
        table = torch.histogramdd(torch.stack([base[:, 0], other[:, 0]], 1), bins=[10, 10])
        assert stats.chisquare(table.hist.flatten().numpy()).pvalue > 1e-3, name


def some_keys(count, seed=0):
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
def test_compiled_numbers_equal_torch(monkeypatch):
    seeds, keys = some_keys(1000), some_keys(1000, 1)
    positions = torch.randint(0, 2**40, (1000,), generator=torch.Generator().manual_seed(2))
    compiled = [streams(seeds, positions, purpose) for purpose in Purpose]
    compiled += [numbers(keys, count) for count in (0, 1, 7) for numbers in (substreams, uniforms)]
    noise = torch.ops.outrider.exponentials(keys[:200], 3000)
    assert torch.equal(noise, torch_exponentials(keys[:200], torch.arange(3000)))
    monkeypatch.setattr(native, "available", lambda: False)
    plain = [streams(seeds, positions, purpose) for purpose in Purpose]
    plain += [numbers(keys, count) for count in (0, 1, 7) for numbers in (substreams, uniforms)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(compiled, plain, strict=True))


def test_noise_is_the_negative_logarithm():
    keys = some_keys(50)
    numbers = uniforms(keys, 20_000)
    expected = torch.from_numpy(-stats.uniform.logsf(numbers.numpy()))
    torch.testing.assert_close(torch_exponentials(keys, torch.arange(20_000)), expected, rtol=4e-15, atol=0)


def weights_of(rows, columns, seed=0):
    """Unnormalised: some flat, some sharp, some with a small support."""
    generator = torch.Generator().manual_seed(seed)
    sharp = torch.tensor([0.0, 1.0, 4.0, 12.0])[torch.randint(4, (rows, 1), generator=generator)]
    weights = (torch.randn(rows, columns, generator=generator) * sharp).exp()
    share = torch.tensor([1.0, 0.3, 0.01])[torch.randint(3, (rows, 1), generator=generator)]
    weights *= torch.rand(rows, columns, generator=generator) < share
    weights[:, columns // 2] += 1e-6
    return weights


@EACH_SET
@pytest.mark.parametrize("columns", [1, 5, 16, 1000, 4099])
@pytest.mark.parametrize("mapped", [False, True])
def test_draws_equal_torch(instruction_set, columns, mapped):
    weights, keys = weights_of(200, columns), some_keys(200)
    tokens = torch.randperm(10 * columns)[:columns].sort().values if mapped else None
    got = gumbel_argmax(weights, keys, tokens)
    assert torch.equal(got, torch_gumbel_argmax(weights, keys, tokens))
    assert bool((weights.gather(1, got[:, None]) > 0).all())


@pytest.mark.parametrize("draw_one", [gumbel_argmax, torch_gumbel_argmax])
def test_never_a_token_of_weight_zero(draw_one):
    for scale in (1e-38, 1e-20, 1.0):
        for place in (0, 1, 255, 767):
            weights = torch.zeros(4, 768)
            weights[:, place] = scale
            assert draw_one(weights, some_keys(4)).tolist() == [place] * 4


def test_draws_follow_the_weights():
    """For neighbouring seeds and positions, and tokens too rare for 24 bits."""
    seeds, positions = torch.arange(400).repeat_interleave(1000), torch.arange(1000).repeat(400)
    p = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.06, 0.03, 0.01])
    counts = torch.bincount(gumbel_argmax(p.expand(400_000, -1), streams(seeds, positions, Purpose.TOKEN)), minlength=7)
    assert stats.chisquare(counts.numpy(), p.double().numpy() / float(p.double().sum()) * 400_000).pvalue > 1e-3
    rare = 10_000
    weights = torch.cat([torch.full((rare,), 1e-8), torch.ones(1)]).expand(100_000, -1)
    drawn = torch.cat([gumbel_argmax(part, some_keys(5000, i)) for i, part in enumerate(weights.split(5000))])
    count = int((drawn < rare).sum())
    assert abs(count - 10) < 5 * math.sqrt(10)  # 1e-4 of 100,000
    assert len(set(drawn[drawn < rare].tolist())) == count  # different tokens


def test_one_key_makes_two_distributions_agree():
    """They agree with a chance of at least (1 - TV) / (1 + TV)."""
    p = torch.tensor([0.6, 0.4, 0.0]).expand(100_000, -1)
    q = torch.tensor([0.6, 0.0, 0.4]).expand(100_000, -1)
    keys = some_keys(100_000)
    agreed = float((gumbel_argmax(p, keys) == gumbel_argmax(q, keys)).double().mean())
    assert abs(agreed - 0.6 / 1.4) < 5 * math.sqrt(0.25 / 100_000)


def test_seeds_of_choices():
    assert choice_seed(7, 0) == 7
    seeds = {choice_seed(seed, index) for seed in (-(2**63), -1, 0, 7, 2**63 - 1) for index in range(20)}
    assert len(seeds) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert choice_seed(7, 3) == int(torch_streams(torch.tensor(7), torch.tensor(3), Purpose.CHOICE))
