"""Test servers run the defaults; a table lists the ones they turn off."""

import ast
from pathlib import Path

from running import NOT_DEFAULT, TURNED_OFF

from outrider.server.settings.setting import declared
from outrider.server.settings.settings import Settings


def test_no_default_is_turned_off_without_a_reason() -> None:
    off = {f"--no-{each.name.replace('_', '-')}" for each, _ in declared(Settings) if each.default is True}
    off |= {f"--{each.name.replace('_', '-')}" for each, _ in declared(Settings) if each.name.startswith("disable_")}
    assert "--no-lookup" in off
    said = {
        node.value
        for path in Path(__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert off & said == off & {*NOT_DEFAULT, *TURNED_OFF}
