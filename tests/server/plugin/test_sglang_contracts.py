"""The installed SGLang is the one that Outrider was written for."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import sglang_contracts
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from outrider.server.model import families
from outrider.server.plugin import must_take


@pytest.fixture
def registry() -> Iterator[type[HookRegistry]]:
    kept = HookRegistry._hooks, HookRegistry._patched, HookRegistry.__dict__["apply_hooks"]
    HookRegistry._hooks, HookRegistry._patched = defaultdict(list), set()
    yield HookRegistry
    HookRegistry._hooks, HookRegistry._patched, HookRegistry.apply_hooks = kept


class Theirs:
    def method(self) -> str:
        return "theirs"


class Inheriting(Theirs):
    """Defines no attribute itself."""


@pytest.mark.slow
def test_code_that_ours_relies_on_is_unchanged() -> None:
    """To fix a failure: read SGLang's changes, adapt our code, run `python tests/support/sglang_contracts.py
    --write`."""
    assert sglang_contracts.report() == []
    assert sglang_contracts.read() == sglang_contracts.contract()


def test_changes_are_named_with_the_place_of_our_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored fingerprints and the family table differ from the installed SGLang."""
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    read = sglang_contracts.read()
    read["code"] |= {f"{scheduler}._add_request_to_queue": f"{0:016} any.py", f"{scheduler}.gone": f"{1:016} any.py"}
    read["code"] |= {f"{scheduler}.send_abort_output": f"{2:016}"}
    del read["code"]["sglang.srt.model_loader.loader._initialize_model"]
    monkeypatch.setattr(sglang_contracts, "FILE", tmp_path / "contracts.json")
    sglang_contracts.FILE.write_text(json.dumps(read))
    monkeypatch.setattr(families, "SERVED", families.SERVED - {"LlamaForCausalLM"})
    lines = sglang_contracts.report()
    assert [re.sub(r":\d+\)", ":LINE)", line.removeprefix("sglang.srt.")) for line in lines] == [
        "managers.scheduler.Scheduler.gone is no longer touched",
        "managers.scheduler.Scheduler._add_request_to_queue has changed (server/plugin/hooks/request_guard.py:LINE)",
        "managers.scheduler.Scheduler.send_abort_output has changed (relied on)",
        "model_loader.loader._initialize_model has not been read (server/plugin/loading/stated.py:LINE)",
        "LlamaForCausalLM is not in server/model/families.toml",
    ]
    path, line = re.findall(r"\((.*):(\d+)\)", lines[1])[0]
    assert "_add_request_to_queue" in (sglang_contracts.ROOT / path).read_text().splitlines()[int(line) - 1]


def test_an_sglang_that_does_not_fit_is_still_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, name = sglang_contracts.read(), "sglang.srt.model_loader.loader._initialize_model"
    monkeypatch.setattr(sglang_contracts, "FILE", tmp_path / "contracts.json")
    read["code"][name] = f"{0:016} server/plugin/loading/stated.py"
    sglang_contracts.FILE.write_text(json.dumps(read))
    monkeypatch.setattr(sglang_contracts, "TOUCHED", "raise ImportError('no HookRegistry')")
    monkeypatch.setattr(sglang_contracts, "touched", sglang_contracts.touched.__wrapped__)
    assert sglang_contracts.report() == [
        "Outrider does not fit it: ImportError: no HookRegistry",
        f"{name} has changed (server/plugin/loading/stated.py)",
    ]


@pytest.mark.parametrize("name", ["sglang.srt.managers.scheduler.Scheduler.gone", "sglang.srt.gone.Scheduler.run"])
def test_a_hook_that_cannot_be_applied_is_an_error(registry: type[HookRegistry], name: str) -> None:
    ours, others = HookSource(must_take.PLUGIN, "outrider"), HookSource("another", "another")
    with must_take.fatal_failures():
        registry.register(name, lambda *_: None, HookType.AFTER, source=others)
    registry.apply_hooks()
    registry.register(name, lambda *_: None, HookType.AFTER, source=ours)
    with pytest.raises(must_take.NotApplied, match=f"no place for Outrider's {name}"):
        registry.apply_hooks()


def test_a_registration_that_fails_is_an_error_where_sglang_goes_on(registry: type[HookRegistry]) -> None:
    with suppress(KeyError), must_take.fatal_failures():
        raise KeyError("layer")
    with pytest.raises(must_take.NotApplied, match="plugin failed: KeyError"):
        registry.apply_hooks()


def test_missing_names_cannot_be_replaced() -> None:
    with pytest.raises(must_take.NotApplied, match=r"Inheriting\.method"):
        must_take.replace(Inheriting, "method", lambda self: "ours")
    must_take.replace(Theirs, "method", lambda self: "ours")
    assert Inheriting().method() == "ours"
    module = ModuleType("theirs")
    with pytest.raises(must_take.NotApplied, match=r"theirs\.has_tiles \(the module does not define it\)"):
        must_take.replace(module, "has_tiles", True)
    module.has_tiles = False  # type: ignore[attr-defined]
    must_take.replace(module, "has_tiles", True)
    assert module.has_tiles
