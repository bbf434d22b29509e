"""Survival and top-K against the planner's own, ties and broken confidences included."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.cuda import admission
from outrider.kernels.drafts import torch_admit
from outrider.kernels.random_batches import admission as admission_batch
from outrider.scheduler.planners.admission import largest, survival_of


@given(
    requests=st.sampled_from([1, 3, 16, 300]),
    gamma=st.sampled_from([1, 4, 7, 15]),
    share=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    bounded=st.sampled_from(["", "by position", "by request"]),
    hurried=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_admits_what_the_planner_admits(requests, gamma, share, bounded, hurried, seed):
    confidence, draft_lens, first = admission_batch(requests, gamma, seed, hurried=hurried)
    tokens = int(share * requests * gamma)
    bounds = {
        "": None,
        "by position": 0.3 / torch.linspace(1.0, 0.5, gamma),
        "by request": torch.rand(requests, 1, generator=torch.Generator().manual_seed(seed)),
    }[bounded]
    arguments = confidence, draft_lens, torch.tensor([tokens])
    lens, survival = admission.admit(*arguments, bounds, first)
    planned = survival_of(confidence, draft_lens)
    assert torch.equal(survival, planned)
    hurry = None if first is None else first.numpy()
    found = largest(confidence, draft_lens, tokens, bounds=None if bounds is None else bounds.numpy(), first=hurry)
    assert torch.equal(lens, found)
    for one, other in zip(torch_admit(*arguments, bounds=bounds, first=first), (lens, survival), strict=True):
        assert torch.equal(one, other)


def test_whether_a_token_is_admitted_does_not_depend_on_what_comes_later():
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        confidence = torch.rand(6, 5, generator=generator)
        draft_lens, tokens = torch.full((6,), 5), torch.tensor([9])
        before, _ = admission.admit(confidence, draft_lens, tokens, None, None)
        later = confidence.clone()
        later[2, 3:] = torch.rand(2, generator=generator)
        after, _ = admission.admit(later, draft_lens, tokens, None, None)
        assert min(int(before[2]), 3) == min(int(after[2]), 3)
