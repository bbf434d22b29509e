"""Training steps stay on their device."""

import dataclasses
from typing import Any

import pytest
import torch
from tiny_drafters import DFLASH, DFLASH2, GATED, LILICORR, TRUNCATED

from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.model import BlockModel
from outrider.drafters.training.batches import BatchMaker
from outrider.drafters.training.forward import FrozenTarget, hidden_states
from outrider.drafters.training.loop import learn_from
from outrider.drafters.training.loss import LossWeights
from outrider.drafters.training.store import Sequence

META = torch.device("meta")
"""Knows only shapes: reading a number raises, and so do tensors of two devices."""


WEIGHTS = LossWeights(ce=0.1, tv=0.9, kl=0.5, kl_falloff=3.0, survival=True)


STEPS = {"dspark": TRUNCATED, "gated": GATED, "dflash": DFLASH, "dflash2": DFLASH2, "lilicorr": LILICORR}


@pytest.mark.parametrize("config", STEPS.values(), ids=STEPS)
def test_a_training_step_on_a_gpu_never_waits(config: BlockConfig) -> None:
    """No number is read back and no tensor lies elsewhere."""
    model = BlockModel(config, torch.arange(config.logit_size))
    maker = BatchMaker(config, model.vocab, device=torch.device("cpu"), tile=3)
    sequence = Sequence(
        torch.arange(30), 9, torch.randn(30, len(config.target_layers) * config.hidden_size),
        torch.randint(0, 96, (21, 5)), torch.rand(21, 5) / 5,
    )  # fmt: skip
    step = maker.cut([sequence, sequence], [torch.arange(10, 28)] * 2, config.gamma)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    frozen = FrozenTarget(embedding, embedding[: config.logit_size])
    with META:
        model = BlockModel(config)
    frozen, step = _moved(frozen), _moved(step)
    row = learn_from(model, frozen, step, hidden_states(model, frozen, step, config.gamma), WEIGHTS, alpha_conf=1.0)
    assert {x.device for x in row.values()} == {META}
    assert all(p.grad is not None for p in model.parameters())


def _moved(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(META)
    if isinstance(x, list):
        return [_moved(value) for value in x]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{f.name: _moved(getattr(x, f.name)) for f in dataclasses.fields(x)})
    return x
