"""Confidences from a draft's own distribution."""

import torch

from outrider.drafters.confidence import GREEDY, SAMPLED, own_confidence


def test_it_is_a_function_of_the_largest_chance_and_the_entropy() -> None:
    q, temperatures = torch.randn(8, 50).softmax(-1), torch.tensor([0.0, 0.7] * 4)
    largest, entropy = q.max(-1).values, -(q * q.log()).sum(-1)
    for row, found in enumerate(own_confidence(q, temperatures)):
        a, b, c = GREEDY if temperatures[row] == 0 else SAMPLED
        wanted = torch.sigmoid(a * torch.log(largest[row] / (1 - largest[row])) + b * entropy[row] + c)
        torch.testing.assert_close(found, wanted)


def test_surer_drafts_have_larger_ones_and_all_are_finite() -> None:
    point = torch.zeros(50).index_fill_(0, torch.tensor(3), 1)
    rows = torch.stack([torch.ones(50) / 50, torch.arange(50.0).softmax(-1), point])
    for temperature in (0.0, 1.0):
        confidence = own_confidence(rows, torch.full((3,), temperature))
        assert bool(((confidence > 0) & (confidence < 1)).all())
        assert bool((confidence.diff() > 0).all())
