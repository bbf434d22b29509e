"""Margins for results that differ by rounding.

docs/kernels.md lists where bits are equal. Elsewhere the order of sums depends on the processor and, in plain torch, on
the number of rows.
"""

import torch

EPSILON = torch.finfo(torch.float32).eps


def assert_near(found: torch.Tensor, expected: torch.Tensor, terms: int) -> None:
    """Equal up to the order of sums of `terms` numbers in float32, and one rounding to the dtype.

    Two sums differ by at most `terms` epsilons; for sums of sums, as in a network, add all terms. The scale is the
    largest expected number, at least 1, since probabilities come from logits, norms from rows.
    """
    size = expected[expected.isfinite()].abs().amax() if expected.isfinite().any() else torch.tensor(0.0)
    atol = terms * EPSILON * max(1.0, float(size))
    torch.testing.assert_close(found, expected, rtol=torch.finfo(expected.dtype).eps, atol=atol, equal_nan=True)
