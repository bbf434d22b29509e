"""What a GPU needs: attention by rectangles, and steps that stay on their device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny_drafters import DFLASH, GATED, TRUNCATED

from outrider.drafters.block import BlockConfig, BlockModel
from outrider.drafters.training.batches import BatchMaker
from outrider.drafters.training.forward import FrozenTarget
from outrider.drafters.training.loop import train_step
from outrider.drafters.training.loss import LossWeights
from outrider.drafters.training.padded import padded_attention, rectangles
from outrider.drafters.training.store import Sequence
from outrider.kernels.attention import flat_attention
from outrider.kernels.flat_batch import FlatBatch

META = torch.device("meta")
"""Knows shapes alone: a tensor on another device beside it raises, and so does any number read back."""


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [5, 1, 2, 1], [5, 3, 7, 2], [0, 4, 1, 0]])
def test_padded_attention_is_flat_attention(queries: list[int], window: int) -> None:
    """Prompts, single tokens and pieces of prompts behind a cache, with queries that share key heads."""
    torch.manual_seed(0)
    lens = [count + more for count, more in zip(queries, [0, 6, 2, 9], strict=True)]
    table = torch.randperm(80)[:64].view(4, 16).int()
    batch = FlatBatch(
        torch.tensor([0, *queries]).cumsum(0).int(), torch.tensor(lens).int(), torch.tensor([2, 0, 3, 1]), table
    )
    q = torch.randn(sum(queries), 6, 16)
    k_pool, v_pool = torch.randn(80, 2, 16), torch.randn(80, 2, 16)
    k_pool[~torch.isin(torch.arange(80), table)] = torch.nan  # nobody's slots
    expected = flat_attention(q, k_pool, v_pool, batch, scale=0.3, window=window)
    found = padded_attention(q, k_pool, v_pool, rectangles(batch, window), scale=0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


HOW = LossWeights(ce=0.1, tv=0.9, kl=0.5, kl_falloff=3.0, survival=True)


@pytest.mark.parametrize("config", [TRUNCATED, GATED, DFLASH], ids=["dspark", "gated", "dflash"])
def test_a_training_step_on_a_gpu_waits_for_nothing(config: BlockConfig) -> None:
    """Nothing is read back and nothing lies elsewhere, forward and backward."""
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
    told = train_step(model, _moved(frozen), _moved(step), HOW, alpha_conf=1.0)
    assert {x.device for x in told.values()} == {META}
    assert all(p.grad is not None for p in model.parameters())


def test_attention_by_rectangles_waits_for_nothing() -> None:
    table, queries = torch.randperm(80)[:64].view(4, 16).int(), [5, 1, 2, 1]
    batch = FlatBatch(
        torch.tensor([0, *queries]).cumsum(0).int(), torch.tensor([5, 7, 4, 1]).int(), torch.tensor([2, 0, 3, 1]), table
    )
    q, pool = (torch.empty(n, heads, 16, device=META) for n, heads in ((9, 6), (80, 2)))
    assert padded_attention(q, pool, pool, _moved(rectangles(batch)), scale=0.3).device == META


def _moved(x: Any) -> Any:
    """The same, with the shapes of its tensors alone."""
    if isinstance(x, torch.Tensor):
        return x.to(META)
    if isinstance(x, list):
        return [_moved(value) for value in x]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{f.name: _moved(getattr(x, f.name)) for f in dataclasses.fields(x)})
    return x
