"""Decisions on drafts by Triton against torch: confidences and ends of answers, and whose draft is taken."""

import pytest
import torch
from gpu_device import differing, moved

from outrider.drafters.base import Draft
from outrider.drafters.lookup_first import LOOKUP_THRESHOLD
from outrider.kernels.cpu import native
from outrider.kernels.cuda import drafts
from outrider.kernels.drafts import weigh_drafts

CLASSES, ROWS = 6, 9


def weighed(seed: int, requests: int, gamma: int, ends: int) -> tuple[torch.Tensor, ...]:
    """Arguments of `weigh_drafts` but for the parameters: few words, of which some end answers, and broken numbers."""
    draw = torch.Generator().manual_seed(seed)
    confidence = torch.rand(requests, gamma, generator=draw)
    kinds = torch.randint(6, (requests, gamma), generator=draw)
    for kind, value in enumerate((0.0, 1.0, torch.nan)):
        confidence[kinds == kind] = value
    return (
        torch.randint(8, (gamma, requests), generator=draw).T,
        confidence,
        torch.randint(CLASSES, (requests,), generator=draw),
        torch.randint(ROWS, (requests,), generator=draw),
        torch.randint(-1, 8, (ROWS, ends), generator=draw),
    )


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(("requests", "gamma", "ends"), [(1, 7, 1), (32, 4, 3), (5, 1, 2), (3, 16, 0)])
def test_weighs_as_torch_bit_for_bit(requests, gamma, ends, calibrated, monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    for seed in range(8):
        batch = weighed(seed, requests, gamma, ends)
        draw = torch.Generator().manual_seed(seed)
        parameters = torch.rand(gamma, CLASSES, generator=draw).T + 0.3, torch.randn(CLASSES, gamma, generator=draw)
        expected = weigh_drafts(*batch, parameters if calibrated else None)
        found = drafts.weigh_drafts(*moved(batch), *(moved(parameters) if calibrated else (None, None)))
        assert differing([part.nan_to_num(-1) for part in found], [part.nan_to_num(-1) for part in expected]) == 0


@pytest.mark.parametrize(("requests", "gamma", "model_gamma"), [(1, 4, 4), (32, 7, 5), (9, 16, 1)])
def test_takes_the_drafts_that_torch_takes(requests, gamma, model_gamma, monkeypatch):
    taken = set()
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        lookup, lens = torch.randint(50, (requests, gamma), generator=draw), torch.full((requests,), gamma)
        found = Draft(lookup, lens, torch.rand(requests, gamma, generator=draw), looked_up=lens > 0)
        tokens = torch.randint(50, (model_gamma, requests), generator=draw).T  # not dense, as a drafter may give them
        lens = model_gamma * torch.randint(4, (requests,), generator=draw).clamp(max=1)
        model = Draft(tokens, lens, torch.rand(model_gamma, requests, generator=draw).T, drafting=requests)
        expected = found.confidence[:, :model_gamma].cumprod(1).sum(1)
        better = (expected < LOOKUP_THRESHOLD) & (lens > 0) & (expected < 1.7 * model.confidence[:, 0])
        wide = model.widened(gamma)
        chosen = drafts.choose(
            *moved((found.tokens, found.lens, found.confidence, tokens, lens, model.confidence)), LOOKUP_THRESHOLD, 1.7
        )
        assert differing(chosen[0], wide.tokens.where(better[:, None], found.tokens)) == 0
        assert differing(chosen[1], wide.lens.where(better, found.lens)) == 0
        assert differing(chosen[2], wide.confidence.where(better[:, None], found.confidence)) == 0
        assert differing(chosen[3], ~better) == 0
        taken |= set(better.tolist())
    assert taken == {True, False}
