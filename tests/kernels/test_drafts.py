"""Calibrated confidences, ends of answers and admission: compiled kernels against torch and the planner."""

from functools import partial

import pytest
import torch
from admissions import cases
from hypothesis import given
from references import plain

from outrider.kernels.cpu import native
from outrider.kernels.drafts import admit, weigh_drafts

ROWS, CASES, GAMMA = 5, 6, 7
END, STOP = 90, 91

needs_compiled = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")


both = pytest.mark.parametrize(
    "weigh", [pytest.param(weigh_drafts, marks=needs_compiled), partial(plain, weigh_drafts)]
)


def drafts(generator, requests, ends):
    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    confidence = torch.rand(requests, GAMMA, generator=generator)
    confidence[draw(4, requests, GAMMA) == 0] = 0.0
    confidence[draw(6, requests, GAMMA) == 0] = 1.0
    confidence[draw(9, requests, GAMMA) == 0] = torch.nan
    return (
        draw(8, GAMMA, requests).T,  # strided, as a drafter may give them
        confidence,
        draw(CASES, requests),
        draw(ROWS, requests),
        draw(8, ROWS, ends) - 1,
        (torch.rand(CASES, GAMMA, generator=generator) + 0.3, torch.randn(CASES, GAMMA, generator=generator)),
    )


@needs_compiled
@pytest.mark.parametrize("calibrated", [True, False])
def test_weighed_as_by_torch(calibrated):
    generator = torch.Generator().manual_seed(0)
    for round_number in range(60):
        *batch, parameters = drafts(generator, 1 + round_number % 9, 1 + round_number % 3)
        parameters = parameters if calibrated else None
        confidence, ends = weigh_drafts(*batch, parameters)
        expected, expected_ends = plain(weigh_drafts, *batch, parameters)
        torch.testing.assert_close(confidence, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert torch.equal(ends, expected_ends)


@both
def test_a_draft_reaches_to_the_first_token_that_ends_its_answer(weigh):
    tokens = torch.tensor([[1, STOP, END, END]]).expand(4, 4)
    ends = torch.tensor([[END, -1], [END, STOP], [-1, -1], [1, 2]])
    rows, zeros = torch.tensor([0, 1, 2, 3]), torch.zeros(4, dtype=torch.int64)
    _, lens = weigh(tokens, torch.rand(4, 4), zeros, rows, ends, None)
    assert lens.tolist() == [3, 2, 5, 1]


@both
def test_certainty_can_be_softened_and_zeros_and_nan_stay(weigh):
    confidence = torch.tensor([[1.0, 0.0, torch.nan, 0.5]])
    one = torch.zeros(1, dtype=torch.int64)
    parameters = torch.tensor([[0.5, 0.5, 0.5, 0.5]]), torch.tensor([[0.0, 3.0, 0.0, 1.0]])
    softened, _ = weigh(torch.zeros(1, 4, dtype=torch.int64), confidence, one, one, torch.tensor([[-1]]), parameters)
    assert 0.99 < float(softened[0, 0]) < 1.0
    assert float(softened[0, 1]) == 0.0
    assert bool(softened[0, 2].isnan())
    assert float(softened[0, 3]) == pytest.approx(float(torch.tensor(1.0).sigmoid()))
    assert confidence[0, 0] == 1.0  # the input is unchanged


@needs_compiled
@pytest.mark.parametrize(("index", "name"), [(2, "classes"), (3, "rows")])
@pytest.mark.parametrize("value", [-1, 99])
def test_no_number_outside_the_tables_is_read(index, name, value):
    *batch, parameters = drafts(torch.Generator().manual_seed(1), 3, 1)
    batch[index] = batch[index].clone()
    batch[index][-1] = value
    with pytest.raises(RuntimeError, match=name):
        weigh_drafts(*batch, parameters)


@needs_compiled
@given(cases())
def test_admits_the_same_tokens_as_the_planner(case):
    arguments = case.confidence, case.draft_lens, torch.tensor([case.tokens])
    admitted = admit(*arguments, bounds=case.bounds, first=case.first)
    by_torch = plain(admit, *arguments, bounds=case.bounds, first=case.first)
    for one, planned, other in zip(admitted, case.planned(), by_torch, strict=True):
        assert torch.equal(one, planned)
        assert torch.equal(one, other)


@needs_compiled
def test_a_lone_request_has_a_bound_at_each_position():
    confidence, lens = torch.tensor([[0.5, 0.8, 0.9]]), torch.tensor([3])
    for bounds, admitted in (([0.4, 0.4, 0.3], 3), ([0.4, 0.41, 0.3], 1), ([0.6, 0.1, 0.1], 0)):
        assert int(admit(confidence, lens, torch.tensor([9]), bounds=torch.tensor([bounds]))[0]) == admitted


@needs_compiled
@pytest.mark.parametrize("bounds", [torch.rand(2, 3), torch.rand(4), torch.rand(2)])
def test_bounds_of_another_shape_are_refused(bounds):
    with pytest.raises(RuntimeError, match="bounds are"):
        admit(torch.rand(5, 3), torch.full((5,), 3), torch.tensor([9]), bounds=bounds)
