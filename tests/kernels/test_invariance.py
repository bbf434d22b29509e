"""Rows do not depend on each other, even if a BLAS chooses the order of its sums by shape and place.

Small integers sum exactly in any order; a made-up BLAS adds deviations.
"""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from batches import alone, ragged_attention
from references import reference_linear

from outrider.kernels import linear
from outrider.kernels.attention import Scores, torch_attention
from outrider.kernels.linear import ROW_BLOCK, count_places, invariant_linear

DEPTH, OUTPUTS = 24, 10


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linear, "_found", {})
    linear._warn_slow.cache_clear()
    yield
    linear._warn_slow.cache_clear()


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


Bias = Callable[[torch.Tensor], torch.Tensor]
"""Rows [M, K] -> the numbers added to each row's products [M, 1]."""


def by_place(period: int) -> Bias:
    """Places 0 .. period - 1 get the same deviation, the next ones another."""
    return lambda rows: (torch.arange(len(rows)) // period)[:, None] * 0.25


def by_number(rows: torch.Tensor) -> torch.Tensor:
    return torch.full((len(rows), 1), len(rows) / 4)


def by_the_row_before(rows: torch.Tensor) -> torch.Tensor:
    return rows.roll(1, 0)[:, :1] * 0.25


def by_alignment(rows: torch.Tensor) -> torch.Tensor:
    return torch.full((len(rows), 1), rows.data_ptr() % 64 / 4)


BLAS = pytest.mark.parametrize(
    "bias", [by_place(8), by_place(3), by_place(1), by_number, by_the_row_before, by_alignment],
    ids=["two halves", "threes", "place", "number", "neighbour", "alignment"],
)  # fmt: skip


@BLAS
def test_linear(bias: Bias) -> None:
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T + bias(x)

    weight, x = integers(OUTPUTS, DEPTH), integers(50, DEPTH, seed=1)
    together = invariant_linear(x, weight, product=product)
    assert (together - reference_linear(x, weight)).abs().max() <= 4  # the made-up BLAS adds this
    for first in (0, 1, 2, 15, 16, 33):
        for rows in (1, 2, 3, 7, 8, 9, 16, 17):
            assert torch.equal(
                invariant_linear(x[first : first + rows], weight, product=product), together[first:][:rows]
            )


def test_a_made_up_blas_would_be_detected() -> None:
    """Power of these tests: used directly, each made-up BLAS makes rows depend on others."""
    x = integers(50, DEPTH, seed=1)
    for bias in (by_place(8), by_number, by_the_row_before, by_alignment):
        assert any(not torch.equal(bias(x[first:])[0], bias(x)[first]) for first in range(20))


@pytest.mark.slow
@BLAS
def test_attention(bias: Bias) -> None:
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ right + torch.stack([bias(rows) for rows in left]) * 0.01

    q, k, v, batch = ragged_attention([1, 8, 3, 5, 1, 20], [1, 9, 3, 200, 300, 700], heads=(4, 2), dims=(16, 16))
    together = torch_attention(q, k, v, batch, Scores(0.25), product)
    for token in range(q.shape[0]):
        one = torch_attention(q[token, None], k, v, alone(batch, token), Scores(0.25), product)
        assert torch.equal(one[0], together[token]), f"token {token}"


@pytest.mark.parametrize(("bias", "places"), [(by_place(16), 16), (by_place(8), 8), (by_place(3), 3), (by_place(1), 1)])
def test_as_many_places_are_used_as_possible(bias: Bias, places: int) -> None:
    weight = integers(OUTPUTS, DEPTH)
    assert count_places(lambda rows: rows @ weight.T + bias(rows), torch.empty(ROW_BLOCK, DEPTH)) == places
    assert count_places(lambda rows: rows @ weight.T + by_the_row_before(rows), torch.empty(4, DEPTH)) == 1


def test_a_shape_is_tried_once_and_slowness_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert x.shape == (ROW_BLOCK, DEPTH)
        assert x.data_ptr() % 64 == 0
        return x @ weight.T + by_place(1)(x)

    with caplog.at_level(logging.WARNING, linear.__name__):
        for seed in range(3):
            invariant_linear(integers(2, DEPTH), integers(OUTPUTS, DEPTH, seed=seed), product=product)
        invariant_linear(integers(2, DEPTH), integers(OUTPUTS + 1, DEPTH), product=product)
    assert calls == 2 * (ROW_BLOCK + 1) + 4 * 2
    (record,) = caplog.records
    assert "C++ compiler" in record.getMessage()
