"""Random inputs of admission: drafts of any length, ties, NaN confidences, all kinds of bounds."""

from typing import NamedTuple

import torch
from batches import admission
from hypothesis import strategies as st

from outrider.scheduler.admission import largest, survival_of


class Case(NamedTuple):
    confidence: torch.Tensor
    draft_lens: torch.Tensor
    tokens: int
    bounds: torch.Tensor | None
    first: torch.Tensor | None

    def planned(self) -> tuple[torch.Tensor, torch.Tensor]:
        bounds, first = (None if found is None else found.numpy() for found in (self.bounds, self.first))
        lens = largest(self.confidence, self.draft_lens, self.tokens, bounds=bounds, first=first)
        return lens, survival_of(self.confidence, self.draft_lens)


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
