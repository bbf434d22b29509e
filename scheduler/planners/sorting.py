"""The largest survivals in order, for the asynchronous planner's search.

numpy sorts 16-bit integers by radix: 1792 of them (256 requests, gamma 7) in 5 us on any CPU. Floats take as long where
numpy has a vectorised sort for the CPU (AVX2 and numpy 2, AVX-512), and 75 us elsewhere, most of the planner's time. So
survivals are rounded down to steps of 1 / RESOLUTION, finer than anything else that the search knows, and sorted as
integers. Rounding keeps the order, so the result is that of sorting first.
"""

from __future__ import annotations

import numpy as np

RESOLUTION = 50_000.0
"""Steps in a survival of 1. With the largest correction (`Correction.BOUNDS`) they still fit into 16 bits."""


def largest(survival: np.ndarray, count: int) -> np.ndarray:
    """[samples, min(count, n)] uint16: the largest survivals of each sample in descending order, in steps of
    1 / RESOLUTION.

    survival: [samples, n] float32 in 0..65535 / RESOLUTION.
    """
    ordered = (survival * np.float32(RESOLUTION)).astype(np.uint16)
    ordered.sort(axis=1, kind="stable")  # "stable" is the radix sort
    return ordered[:, ::-1][:, :count]


def pooled(survival: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """[m] int64 each, m <= samples * count: the largest survivals of each sample, all in descending order and in steps
    of 1 / RESOLUTION, and the sample of each. Zeros are left out.

    survival: [samples, n] float32 in 0..65535 / RESOLUTION.
    """
    samples = len(survival)
    best = largest(survival, count).astype(np.uint32)
    best *= np.uint32(samples)
    best += np.arange(samples, dtype=np.uint32)[:, None]
    ordered = np.sort(best, axis=None)[::-1]
    values, which = np.divmod(ordered, np.uint32(samples))
    useful = int(np.count_nonzero(values))
    return values[:useful].astype(np.int64), which[:useful].astype(np.int64)
