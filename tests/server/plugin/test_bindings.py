"""A change of a module's function reaches all modules that imported it by name."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from sglang.srt.plugins.hook_registry import _propagate_patch

from outrider.server.plugin.bindings import Bindings

Replace = Callable[[object, object, object], int]


@pytest.fixture(params=["sglang", "ours"])
def replace(request: pytest.FixtureRequest) -> Replace:
    return _propagate_patch if request.param == "sglang" else Bindings().replace


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes importable modules with these names in them."""

    def make(name: str, **names: object) -> ModuleType:
        made = ModuleType(f"bound.{name}")
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made

    return make


def test_every_name_is_rebound(replace: Replace, module: Callable[..., ModuleType]) -> None:
    function, other, first, second, third = (lambda: None for _ in range(5))
    defining = module("defining", function=function, alias=function)
    importing = module("importing", function=function, renamed=function, other=other)
    module("none")
    sys.modules["bound.none"] = None  # type: ignore[assignment]
    assert replace(other, second, defining) == 1
    assert replace(lambda: None, first, defining) == 0
    later = module("later", function=function)  # imported while hooks are applied
    assert replace(function, first, defining) == 3
    assert defining.function is defining.alias is function  # SGLang changes this one itself
    assert importing.function is importing.renamed is later.function is first
    assert importing.other is second
    later.function = other
    assert replace(first, third, defining) == 2
    assert importing.function is importing.renamed is third
    assert later.function is other
