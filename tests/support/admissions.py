"""Random inputs of admission: drafts of any length, ties, NaN confidences, all kinds of bounds."""

from typing import NamedTuple

import torch
from batches import admission
from hypothesis import strategies as st

from outrider.kernels.drafts import survival_of


def by_sorting(
    survival: torch.Tensor, tokens: int, bounds: torch.Tensor | None = None, first: torch.Tensor | None = None
) -> torch.Tensor:
    """[R] int64: how many tokens of each request are among the `tokens` largest entries above 0 of survival [R, gamma],
    by sorting them. bounds, first: as in `admit`."""
    if bounds is not None:
        survival = survival * (survival >= bounds).cumprod(1)
    waits = torch.zeros(len(survival), dtype=torch.bool) if first is None else ~first
    places = sorted(
        (bool(waits[r]), -value, r, k)
        for r, row in enumerate(survival.tolist())
        for k, value in enumerate(row)
        if value > 0
    )
    admitted = torch.tensor([r for _, _, r, _ in places[:tokens]], dtype=torch.int64)
    return admitted.bincount(minlength=len(survival))


class Case(NamedTuple):
    confidence: torch.Tensor
    draft_lens: torch.Tensor
    tokens: int
    bounds: torch.Tensor | None
    first: torch.Tensor | None

    def planned(self) -> tuple[torch.Tensor, torch.Tensor]:
        survival = survival_of(self.confidence, self.draft_lens)
        return by_sorting(survival, self.tokens, self.bounds, self.first), survival


@st.composite
def cases(draw: st.DrawFn) -> Case:
    requests, gamma = draw(st.sampled_from([1, 3, 16, 300])), draw(st.sampled_from([1, 4, 7, 15]))
    share, seed = draw(st.sampled_from([0.0, 0.1, 0.5, 2.0])), draw(st.integers(0, 2**31))
    bounds = {
        "": None,
        "by position": 0.3 / torch.linspace(1.0, 0.5, gamma),
        "by request": torch.rand(requests, 1, generator=torch.Generator().manual_seed(seed)),
    }[draw(st.sampled_from(["", "by position", "by request"]))]
    confidence, draft_lens, first = admission(requests, gamma, seed, hurried=draw(st.booleans()))
    return Case(confidence, draft_lens, int(share * requests * gamma), bounds, first)
