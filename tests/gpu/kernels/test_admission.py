"""Survival and top-K compared with the planner's, with ties and NaN confidences."""

import torch
from admissions import cases
from gpu_device import differing, examples, moved
from hypothesis import given

from outrider.kernels.cuda import admission


@examples()
@given(cases())
def test_admits_the_same_tokens_as_the_planner(case):
    arguments = case.confidence, case.draft_lens, torch.tensor([case.tokens])
    admitted = admission.admit(*moved((*arguments, case.bounds, case.first)))
    assert differing(admitted, case.planned()) == 0


def test_admission_of_a_token_does_not_depend_on_later_ones():
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        confidence = torch.rand(6, 5, generator=generator)
        draft_lens, tokens = torch.full((6,), 5), torch.tensor([9])
        before, _ = admission.admit(*moved((confidence, draft_lens, tokens)), None, None)
        later = confidence.clone()
        later[2, 3:] = torch.rand(2, generator=generator)
        after, _ = admission.admit(*moved((later, draft_lens, tokens)), None, None)
        assert min(int(before[2]), 3) == min(int(after[2]), 3)
