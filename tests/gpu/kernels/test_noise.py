"""Noise with the same bits as on a CPU."""

from unittest import mock

import kernel_probes
import torch
from gpu_device import INTERPRETED, differing, moved

from outrider.kernels.cpu import native
from outrider.kernels.cuda import noise
from outrider.kernels.noise import Purpose, draft_keys, torch_exponentials, torch_numbers, torch_streams, uniforms

VOCABULARY = [] if INTERPRETED else [151_936]


def some_keys(*shape, seed=0):
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))


def test_bits_of_the_noise():
    keys = some_keys(64)
    for width in (1024, *VOCABULARY):
        noise = kernel_probes.exponentials(moved(keys), width)
        assert differing(noise, torch_exponentials(keys, torch.arange(width))) == 0


def test_bits_of_keys_and_numbers():
    seeds, positions = some_keys(3, 50), some_keys(3, 50, seed=1).abs() % 1000
    for purpose in Purpose:
        keys = torch_streams(seeds, positions, purpose)
        assert differing(noise.streams(*moved((seeds, positions)), int(purpose)), keys) == 0
    assert differing(noise.numbers(moved(keys[0]), 7, torch.int64), torch_numbers(keys[0], 7)) == 0
    assert differing(noise.numbers(moved(keys[0]), 7, torch.float64), uniforms(keys[0], 7)) == 0


def test_bits_of_drafts_keys():
    """Torch gives the same keys; a seeded request has the target's own key at each position."""
    for count in (1, 7, 40):
        seeds, positions = some_keys(count), some_keys(count, seed=1).abs() % 1000
        seeded = some_keys(count, seed=2) % 2 == 0
        with mock.patch.object(native, "available", return_value=False):
            expected = draft_keys(seeds, seeded, positions, 5)
        purposes = int(Purpose.TOKEN), int(Purpose.DRAFT)
        found = noise.draft_keys(*moved((seeds, seeded, positions)), 5, *purposes)
        assert differing(found, expected) == 0
