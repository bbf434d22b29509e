"""The last layer of a prompt runs only for the rows that are read."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from outrider.server.plugin.cpu.fused_model import _read_rows

LAST, ALL = [2, 3, 7], None
"""Rows of three requests with 3, 1 and 4 tokens."""


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (LAST, {}),
        (LAST, {"mode": ForwardMode.MIXED}),
        (LAST, {"hidden": CaptureHiddenMode.LAST}),
        (LAST, {"hidden": CaptureHiddenMode.FULL, "captured": True}),
        (ALL, {"hidden": CaptureHiddenMode.FULL}),
        (ALL, {"logprobs": True}),
        (ALL, {"mode": ForwardMode.TARGET_VERIFY}),
        (ALL, {"mode": ForwardMode.DECODE}),
        (ALL, {"mode": ForwardMode.DLLM_EXTEND}),
        (ALL, {"causal": False}),
        (ALL, {"lens": [3, 0, 5]}),
    ],
    ids=str,
)
def test_rows_that_are_read(expected, changes):
    given = {"mode": ForwardMode.EXTEND, "hidden": CaptureHiddenMode.NULL, "captured": False, "logprobs": False}
    given |= {"causal": True, "lens": [3, 1, 4]} | changes
    indptr = torch.tensor([0, *given["lens"]]).cumsum(0).int()
    backend = SimpleNamespace(causal=given["causal"], batch=SimpleNamespace(qo_indptr=indptr))
    forward_batch = SimpleNamespace(
        forward_mode=given["mode"], capture_hidden_mode=given["hidden"], return_logprob=given["logprobs"]
    )
    rows = _read_rows(forward_batch, backend, given["captured"])
    assert (rows if rows is None else rows.tolist()) == expected
