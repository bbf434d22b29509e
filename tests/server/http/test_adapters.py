"""Loading and unloading adapters by SGLang's own bookkeeping, with scripted schedulers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARegistry
from sglang.srt.managers import tokenizer_control_mixin as sglang
from sglang.srt.managers.io_struct import LoRAUpdateOutput

from outrider.server.http import adapters
from outrider.server.http.adapters import Adapters
from outrider.server.http.errors import ApiError


class Manager(sglang.TokenizerControlMixin):
    """failing: answers of the schedulers that are failures. told: the kinds of their messages."""

    served_model_name = "model"

    def __init__(self) -> None:
        self.lora_registry, self.lora_update_lock = LoRARegistry(), asyncio.Lock()
        self.pending_lora_unloads: dict[str, str] = {}
        self.lora_ref_cache: dict[str, Any] = {}
        self.failing = 0
        self.told: list[str] = []

    def auto_create_handle_loop(self) -> None: ...

    async def update_lora_adapter_communicator(self, message: Any) -> list[LoRAUpdateOutput]:
        self.told.append(type(message).__name__)
        await asyncio.sleep(0)
        self.failing -= 1
        return [LoRAUpdateOutput(success=self.failing < 0, error_message="no memory", loaded_adapters={})]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> tuple[Adapters, Manager]:
    lora, parallel = SimpleNamespace(enable_lora=True, max_loaded_loras=None), SimpleNamespace(dp_size=1)
    monkeypatch.setattr(sglang, "get_lora", lambda: lora)
    monkeypatch.setattr(sglang, "get_parallel", lambda: parallel)
    monkeypatch.setattr(adapters.adapters, "checked", lambda name, folder, *_: Path(folder))
    settings = SimpleNamespace(has_adapters=False, learn_per="server", enable_lora=True, resolved_engines=1)
    manager = Manager()
    return Adapters(SimpleNamespace(settings=settings, model=None), manager), manager  # type: ignore[arg-type]


def test_an_adapter_whose_unloading_fails_can_be_unloaded_again(loaded: tuple[Adapters, Manager]) -> None:
    served, manager = loaded

    async def scenario() -> None:
        await served.load("sql", "/sql")
        manager.failing = 1
        with pytest.raises(ApiError, match="sql was not unloaded: no memory"):
            await served.unload("sql")
        assert served.names() == ()  # no request may use it
        with pytest.raises(ApiError, match="Retry the unload"):
            await served.load("sql", "/sql")
        await served.unload("sql")
        with pytest.raises(ApiError, match="no adapter 'sql' is loaded"):
            await served.unload("sql")
        await served.load("sql", "/sql")
        assert served.names() == ("sql",)

    asyncio.run(scenario())


def test_changes_at_the_same_time_follow_each_other(loaded: tuple[Adapters, Manager]) -> None:
    served, manager = loaded

    async def both(change: Any, *args: str) -> list[int]:
        results = await asyncio.gather(change(*args), change(*args), return_exceptions=True)
        return [result.status if isinstance(result, ApiError) else 200 for result in results]

    async def scenario() -> None:
        assert await both(served.load, "sql", "/sql") == [200, 409]
        assert await both(served.unload, "sql") == [200, 404]
        assert manager.told == ["LoadLoRAAdapterReqInput", "UnloadLoRAAdapterReqInput"]

    asyncio.run(scenario())
