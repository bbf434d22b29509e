"""The counter-based uniforms: uniform, independent across everything that keys them, and reproducible."""

import pytest
import torch
from scipy import stats

from outrider.kernels.cpu import native
from outrider.kernels.uniforms import Purpose, torch_uniforms, uniforms


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


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
def test_compiled_numbers_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=generator)
    positions = torch.randint(0, 2**40, (1000,), generator=generator)
    for purpose in Purpose:
        for count in (0, 1, 7):
            got = uniforms(seeds, positions, count, purpose)
            assert torch.equal(got, torch_uniforms(seeds, positions, count, purpose))
