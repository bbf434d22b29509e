"""Imports point downward only: server → profiles → scheduler, server → drafters → kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "kernels": set(),
    "drafters": {"kernels"},
    "scheduler": set(),
    "profiles": {"scheduler"},
    "server": {"kernels", "drafters", "scheduler", "profiles"},
}
ONLY_IN_SERVER = {"sglang", "fastapi", "uvicorn", "starlette"}


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_downward(folder):
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_modules(path):
            top, _, rest = name.partition(".")
            if top == "outrider" and rest:
                assert rest.split(".")[0] in MAY_IMPORT[folder] | {folder}, f"{path} imports {name}"
            if folder != "server":
                assert top not in ONLY_IN_SERVER, f"{path} imports {name}"
