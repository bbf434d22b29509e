"""Part B of `outrider gpu-check` on kernels that are FlashInfer's index by index."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import fa2
import pytest
import torch

from outrider.server.errors import UserError
from outrider.server.gpu_check import flashinfer, parts

DEVICE = SimpleNamespace(
    on=torch.device("cpu"), tiny=True, types=(torch.float32, torch.float16), graph=lambda run: run,
    synchronise=lambda: None, seconds=lambda run: 1e-3,
)  # fmt: skip


def measured(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=fa2.PagedWrapper)
    )
    return [one for step in parts.PARTS["B"].steps for one in parts.check("B", step)(DEVICE)]


def test_every_step_of_part_b_is_good(monkeypatch):
    found = measured(monkeypatch)
    assert len(found) > 5
    assert [one for one in found if one.good is False] == []


def test_a_plan_of_other_lengths_is_noticed(monkeypatch):
    plan_verify = flashinfer.plan_verify
    monkeypatch.setattr(flashinfer, "plan_verify", lambda q, s, **more: plan_verify(q, (s - 1).clip(0), **more))
    assert any(one.good is False for one in measured(monkeypatch))


def test_without_flashinfer_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UserError, match="FlashInfer is not installed here"):
        next(iter(parts.check("B", "references")(DEVICE)))
