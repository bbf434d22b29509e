"""SGLang's graph backend, replaced: it keeps the function that would be captured and calls it again for a replay."""

from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Graphs:
    """The function that would be captured, in place of a graph."""

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
