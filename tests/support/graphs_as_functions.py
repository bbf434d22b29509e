"""Graphs, replaced: the function that would be captured is kept, and called again for a replay."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def record(forward: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Replaces the capture of `DraftGraphs`: a replay, and the first run's result, whose tensors replays overwrite."""
    made = forward()

    def replay() -> None:
        new = forward()
        for each in fields(made):
            if isinstance(ours := getattr(made, each.name), torch.Tensor):
                ours.copy_(getattr(new, each.name))

    return replay, made


class Graphs:
    """SGLang's graph backend."""

    def __init__(self) -> None:
        self.captured: dict[Any, Any] = {}
        self.traces: dict[Any, list[list[str]]] = {}

    def capture_one(self, key: Any, forward: Any, **_: Any) -> None:
        assert key not in self.captured
        self.captured[key] = forward
        forward()  # to warm up
        self.replay(key, None)

    @contextmanager
    def replay_session(self) -> Any:
        yield

    def replay(self, key: Any, batch: Any) -> Any:
        with Operations() as operations:
            out = self.captured[key]()
        self.traces.setdefault(key, []).append(operations.found)
        return out
