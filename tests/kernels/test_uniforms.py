"""The counter-based uniforms: uniform, independent across everything that keys them, and reproducible."""

import torch
from scipy import stats

from outrider.kernels.uniforms import Purpose, uniforms


def draw(seeds, positions, count=8, purpose=Purpose.ACCEPT):
    return uniforms(torch.as_tensor(seeds), torch.as_tensor(positions), count, purpose)


def test_uniform_in_the_unit_interval():
    values = draw(torch.arange(5000), torch.arange(5000) % 17).flatten()
    assert float(values.min()) >= 0.0
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
    }
    for name, other in others.items():
        table = torch.histogramdd(torch.stack([base[:, 0], other[:, 0]], 1), bins=[10, 10])
        assert stats.chisquare(table.hist.flatten().numpy()).pvalue > 1e-3, name
