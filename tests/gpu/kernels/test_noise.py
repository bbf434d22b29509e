"""Noise with the bits of the CPU's, and tokens drawn with it."""

import kernel_probes
import torch
from gpu_device import INTERPRETED, differing, examples, moved
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.cuda import noise
from outrider.kernels.noise import (
    Purpose,
    torch_exponentials,
    torch_gumbel_argmax,
    torch_numbers,
    torch_streams,
    torch_uniforms,
)

VOCABULARY = [] if INTERPRETED else [151_936]


def some_keys(*shape, seed=0):
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))


def test_bits_of_the_noise():
    keys = some_keys(64)
    for width in (1024, *VOCABULARY):
        found = kernel_probes.exponentials(moved(keys), width)
        assert differing(found, torch_exponentials(keys, torch.arange(width))) == 0


def test_bits_of_keys_and_numbers():
    seeds, positions = some_keys(3, 50), some_keys(3, 50, seed=1).abs() % 1000
    for purpose in Purpose:
        keys = torch_streams(seeds, positions, purpose)
        assert differing(noise.streams(*moved((seeds, positions)), int(purpose)), keys) == 0
    assert differing(noise.substreams(moved(keys[0]), 7), torch_numbers(keys[0], 7)) == 0
    assert differing(noise.uniforms(moved(keys[0]), 7), torch_uniforms(keys[0], 7)) == 0


@examples()
@given(
    rows=st.sampled_from([1, 3, 20]),
    width=st.sampled_from([1, 5, 1024, 1025, 9000, 20000, *VOCABULARY]),
    named=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_draws_the_same_columns(rows, width, named, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, width + 3, generator=generator)[:, :width] ** 8
    weights[torch.rand(rows, width, generator=generator) < 0.3] = 0
    weights[0] = 0  # nothing to draw from: column 0, as by torch
    tokens = torch.randperm(200_000, generator=generator)[:width].sort().values if named else None
    arrays = weights, some_keys(rows, seed=seed), tokens
    assert differing(noise.gumbel_argmax(*moved(arrays)), torch_gumbel_argmax(*arrays)) == 0
