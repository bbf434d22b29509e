"""Training steps cut from a store."""

import pytest
import torch
from margins import assert_near
from tiny_drafters import TERMS, TINY, make_model, make_sequence

from outrider.drafters.training import batches
from outrider.drafters.training.batches import BatchMaker
from outrider.drafters.training.forward import FrozenTarget, hidden_states
from outrider.drafters.training.loop import learn_from
from outrider.drafters.training.loss import LossWeights


def test_empty_context_rows_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sequences = [make_sequence(length, 4, 96) for length in (70, 20)]
    frozen = FrozenTarget(torch.randn(96, 32), torch.randn(96, 32))
    gradients = []
    for rows in (1, 64):
        monkeypatch.setattr(batches, "CONTEXT_ROWS", rows)
        maker = BatchMaker(TINY, torch.arange(96), device=torch.device("cpu"), tile=3)
        step = maker.cut(sequences, [torch.arange(5, 69, 9), torch.arange(4, 19)], 4)
        assert len(step.context) == (68 + 18 if rows == 1 else 128 + 64)
        model = make_model(TINY).requires_grad_(True)
        hidden = hidden_states(model, frozen, step, step.valid.shape[1])
        learn_from(model, frozen, step, hidden, LossWeights(ce=0.1, tv=0.9), alpha_conf=1.0)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, exact in gradients[0].items():
        size = exact.abs().amax().clamp(min=1e-30)
        assert_near(gradients[1][name] / size, exact / size, TERMS)
