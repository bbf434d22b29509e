"""Zeroes the padding rows that SGLang's attention leaves uninitialised in a verification without a graph.

Kernels that read lengths on the device write only the rows of requests. Padding rows may hold NaN, which spreads where
rows are combined: in slot 0 of the KV cache, a router of experts, one scale of all activations. In a graph SGLang
treats padding as requests, so its rows are written.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout

LEAVING = ("fa3", "trtllm_mha")
"""SGLang's backends that leave padding rows uninitialised."""


class PaddingRows:
    """Wraps three methods of an attention backend."""

    def __init__(self, backend: Any):
        self._prepare, self._prepare_graph = backend.init_forward_metadata, backend.init_forward_metadata_out_graph
        self._attend = backend.forward_extend
        self._end: torch.Tensor | None = None  # [] int32, rows of requests in the forward under way
        self._rows: torch.Tensor | None = None  # [T, 1] bool, padding rows
        backend.init_forward_metadata, backend.init_forward_metadata_out_graph = self.prepare, self.prepare_graph
        backend.forward_extend = self.attend

    def prepare(self, forward_batch: Any) -> None:
        layout = resolve_ragged_verify_layout(forward_batch) if forward_batch.forward_mode.is_target_verify() else None
        self._end, self._rows = None if layout is None else layout.qo_indptr_device[-1], None
        self._prepare(forward_batch)

    def prepare_graph(self, *args: Any, **kwargs: Any) -> None:
        self._end = None
        self._prepare_graph(*args, **kwargs)

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        out = self._attend(*args, **kwargs)
        if self._end is None:
            return out
        if self._rows is None:
            self._rows = (torch.arange(len(out), device=out.device) >= self._end)[:, None]
        return out.flatten(1).masked_fill_(self._rows, 0).view_as(out)


def zeroed(create: Callable[[Any], Any], runner: Any) -> Any:
    """Return the backend that `create` makes for SGLang's model runner, with zeros in padding rows."""
    backend = create(runner)
    PaddingRows(backend)
    return backend
