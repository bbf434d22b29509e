"""Noise with the bits of the CPU's, and tokens drawn with it."""

import kernel_probes
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.cpu import native
from outrider.kernels.cuda import noise
from outrider.kernels.noise import (
    Purpose,
    substreams,
    torch_exponentials,
    torch_gumbel_argmax,
    torch_streams,
    uniforms,
)


def some_keys(*shape, seed=0):
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))


def test_bits_of_the_noise():
    keys = some_keys(64)
    assert torch.equal(kernel_probes.exponentials(keys, 1024), torch_exponentials(keys, torch.arange(1024)))


def test_bits_of_keys_and_numbers(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    seeds, positions = some_keys(3, 50), some_keys(3, 50, seed=1).abs() % 1000
    for purpose in Purpose:
        keys = noise.streams(seeds, positions, int(purpose))
        assert torch.equal(keys, torch_streams(seeds, positions, purpose))
    assert torch.equal(noise.substreams(keys[0], 7), substreams(keys[0], 7))
    assert torch.equal(noise.uniforms(keys[0], 7), uniforms(keys[0], 7))


@given(
    rows=st.sampled_from([1, 3, 20]),
    width=st.sampled_from([1, 5, 1024, 1025, 9000, 20000]),
    named=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_draws_the_same_columns(rows, width, named, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, width + 3, generator=generator)[:, :width] ** 8
    weights[torch.rand(rows, width, generator=generator) < 0.3] = 0
    weights[0] = 0  # nothing to draw from: column 0, as by torch
    tokens = torch.randperm(200_000, generator=generator)[:width].sort().values if named else None
    keys = some_keys(rows, seed=seed)
    assert torch.equal(noise.gumbel_argmax(weights, keys, tokens), torch_gumbel_argmax(weights, keys, tokens))
