"""SGLang is the one that Outrider was written against, and what does not fit it is an error."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from types import ModuleType

import pytest
import sglang_contracts
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from outrider.server.plugin import must_take


@pytest.fixture
def registry() -> Iterator[type[HookRegistry]]:
    """SGLang's registry without hooks."""
    kept = HookRegistry._hooks, HookRegistry._patched, HookRegistry.__dict__["apply_hooks"]
    HookRegistry._hooks, HookRegistry._patched = defaultdict(list), set()
    yield HookRegistry
    HookRegistry._hooks, HookRegistry._patched, HookRegistry.apply_hooks = kept


class Theirs:
    """A class of SGLang's."""

    def method(self) -> str:
        return "theirs"


class Inheriting(Theirs):
    """It defines nothing itself."""


def test_code_that_ours_rests_on_is_as_it_was_read() -> None:
    """Read what SGLang has changed, change ours where it means something else, then write the fingerprints anew:
    `python tests/support/sglang_contracts.py --write`."""
    assert json.loads(sglang_contracts.FILE.read_text())["sglang"] == version("sglang")
    assert sglang_contracts.differences() == []


@pytest.mark.parametrize("name", ["sglang.srt.managers.scheduler.Scheduler.gone", "sglang.srt.gone.Scheduler.run"])
def test_a_hook_that_cannot_be_applied_is_an_error(registry: type[HookRegistry], name: str) -> None:
    ours, others = HookSource(must_take.PLUGIN, "outrider"), HookSource("another", "another")
    with must_take.fatal_failures():
        registry.register(name, lambda *_: None, HookType.AFTER, source=others)
    registry.apply_hooks()  # others' are SGLang's business
    registry.register(name, lambda *_: None, HookType.AFTER, source=ours)
    with pytest.raises(must_take.NotApplied, match=f"no place for Outrider's {name}"):
        registry.apply_hooks()


def test_a_registration_that_fails_is_an_error_where_sglang_goes_on(registry: type[HookRegistry]) -> None:
    with suppress(KeyError), must_take.fatal_failures():  # as SGLang does
        raise KeyError("layer")
    with pytest.raises(must_take.NotApplied, match="plugin failed: KeyError"):
        registry.apply_hooks()


def test_what_a_class_or_module_does_not_define_cannot_be_replaced() -> None:
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


def test_fingerprints_see_code_and_not_comments(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(
        sglang_contracts, "_path", lambda name: folder / "module.py" if name == "package.module" else None
    )
    found = []
    for text in ('class A:\n def f(self):\n  "Old."\n  return 1\n', "class A:\n def f(self):  # new\n  return 1\n",
                 "class A:\n def f(self):\n  return 2\n"):  # fmt: skip
        (folder / "module.py").write_text(text)
        sglang_contracts._tree.cache_clear()
        found.append(sglang_contracts.fingerprints(["package.module.A.f"])["package.module.A.f"])
    assert found[0] == found[1] != found[2]
    with pytest.raises(LookupError):
        sglang_contracts.fingerprints(["package.module.A.g"])
