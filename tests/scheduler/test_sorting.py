"""The fast sort of survivals equals the plain one."""

import numpy as np
import pytest

from outrider.scheduler.curve import LARGEST, RESOLUTION, largest_survivals


def sorted_first(survival: np.ndarray, count: int) -> np.ndarray:
    """Reference of `largest_survivals`: sorts the floats, then rounds down."""
    ordered = np.sort(survival, axis=1)[:, ::-1][:, :count]
    return np.floor(ordered * np.float32(RESOLUTION)).astype(np.uint16)


@pytest.mark.parametrize("seed", range(50))
def test_largest_equals_its_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples, n = int(rng.integers(1, 6)), int(rng.integers(1, 300))
    count = int(rng.integers(0, n + 3))
    survival = rng.beta(5, 1, (samples, n)).astype(np.float32) * np.float32(rng.uniform(0, LARGEST))
    survival[rng.random((samples, n)) < 0.2] = 0.0  # not drafted
    survival[rng.random((samples, n)) < 0.2] = survival[0, 0]  # ties
    expected = sorted_first(survival, count)
    assert expected.shape == (samples, min(count, n))
    sorted_fast = largest_survivals(survival, count)
    assert sorted_fast.dtype == np.uint16
    assert np.array_equal(sorted_fast, expected)


def test_the_largest_correction_of_the_largest_survival_fits() -> None:
    most = np.full((1, 2), LARGEST, dtype=np.float32)
    assert largest_survivals(most.copy(), 2).tolist() == [[2**16 - 1] * 2]
