"""A change of a module's function reaches all modules that imported it by name."""

import sys
from types import ModuleType

import pytest

from outrider.server.plugin.bindings import Bindings


def test_every_name_is_rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **names: object) -> ModuleType:
        made = ModuleType(f"bound.{name}")
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made

    replace = Bindings().replace
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
