"""Margins of results that are promised but for rounding.

Bits are promised where docs/kernels.md has a rule: by compiled kernels whatever the batch, by counter-based noise, and
by the same operations on the same shapes. Otherwise sums are taken in an order that depends on the processor and, in
plain torch, on the number of rows.
"""

import torch

EPSILON = torch.finfo(torch.float32).eps


def assert_near(found: torch.Tensor, expected: torch.Tensor, terms: int) -> None:
    """Equal but for the order of sums of `terms` numbers in float32, and one rounding to the dtype.

    Each addition is off by at most half an epsilon of what has been summed up, so two sums differ by at most
    `terms` epsilons of their numbers. Where sums go into other sums, as in a network, the terms of all add. The largest
    number expected stands for those summed up, or 1 where it is smaller: probabilities come of logits, norms of rows.
    """
    size = expected[expected.isfinite()].abs().amax() if expected.isfinite().any() else torch.tensor(0.0)
    atol = terms * EPSILON * max(1.0, float(size))
    torch.testing.assert_close(found, expected, rtol=torch.finfo(expected.dtype).eps, atol=atol, equal_nan=True)
