"""Imports point downward only, including imports inside functions.

server → profiles → scheduler → kernels, server → drafters → kernels; server, profiles, drafters → storage; in server:
cli → http → bench → tune → processes → settings → model, machine → plugin.
"""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "storage": set(),
    "kernels": set(),
    "drafters": {"kernels", "storage"},
    "scheduler": {"kernels"},
    "profiles": {"scheduler", "storage"},
    "server": {"kernels", "drafters", "scheduler", "profiles", "storage"},
}
ENGINE = {"processes", "settings", "machine", "model", "plugin"}
MAY_IMPORT_IN_SERVER = {
    "plugin": set(),
    "machine": set(),
    "model": {"plugin"},
    "settings": {"machine", "model", "plugin"},
    "processes": {"settings", "machine", "model", "plugin"},
    "tune": ENGINE,
    "bench": {"tune", *ENGINE},
    "http": {"tune", "bench", *ENGINE},
    "doctor": {"http", *ENGINE},
    "cli": {"doctor", "http", "tune", "bench", *ENGINE},
}
BELOW_ALL = {"errors", "log_names", "pictures", "prompt_files"}  # modules outside the parts
COMMANDS = [["tune", "cli"], ["bench", "cli"]]  # command lines, which cli/main.py finds by name
# library: the only folder that may import it
ONLY_IN = {"sglang": "server", "fastapi": "server/http", "starlette": "server/http", "uvicorn": "server/http"}

BEFORE_THE_ENGINE = (
    "outrider.server.cli.serve",
    "outrider.server.tune.cli",
    "outrider.server.bench.cli",
    "outrider.server.http.listen",
    "outrider.server.processes.session",
)


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported_modules(path: Path) -> set[str]:
    """Full names of the modules, and of the names imported from them."""
    package = ("outrider", *path.relative_to(ROOT).parent.parts)
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def imports(folder: str) -> list[tuple[Path, str]]:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    return [(path, name) for path in files for name in imported_modules(path)]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_downward(folder):
    for path, name in imports(folder):
        top, _, rest = name.partition(".")
        if top == "outrider" and rest:
            assert rest.split(".")[0] in MAY_IMPORT[folder] | {folder}, f"{path} imports {name}"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_are_relative_within_a_folder_and_absolute_across(folder):
    """Graphs drawn from a checkout then show the folders."""
    for path in (ROOT / folder).rglob("*.py"):
        depth = len(path.relative_to(ROOT).parent.parts)
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= depth, f"{path}:{node.lineno} leaves {folder}/: import outrider.… instead"
                own = not node.level and (node.module or "").split(".")[:2] == ["outrider", folder]
                assert not own, f"{path}:{node.lineno} imports {node.module}: within {folder}/ imports are relative"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imported_modules_exist(folder):
    """mypy treats missing ones as untyped."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("outrider.")):
                above = path.parents[node.level - 1] if node.level else ROOT
                name = node.module or "" if node.level else (node.module or "").removeprefix("outrider.")
                module = above.joinpath(*filter(None, name.split(".")))
                assert module.is_dir() or module.with_suffix(".py").is_file(), f"{path}:{node.lineno}: no {node.module}"


def test_every_part_of_the_server_has_its_place():
    parts = {path.name for path in (ROOT / "server").iterdir() if (path / "__init__.py").exists()}
    assert parts == set(MAY_IMPORT_IN_SERVER)


@pytest.mark.parametrize("part", MAY_IMPORT_IN_SERVER)
def test_imports_in_the_server_point_downward(part):
    allowed = MAY_IMPORT_IN_SERVER[part] | {part} | BELOW_ALL
    for path, name in imports(f"server/{part}"):
        if name.startswith("outrider.server."):
            assert name.split(".")[2] in allowed, f"{path} imports {name}"
            assert name.split(".")[2:] not in COMMANDS, f"{path} imports {name}; what both need goes beside it"


def test_the_plugin_does_not_import_its_hooks():
    for part in ("cpu", "decode", "loading"):
        for path, name in imports(f"server/plugin/{part}"):
            assert not name.startswith("outrider.server.plugin.hooks"), f"{path} imports {name}"


@pytest.fixture(scope="module")
def import_graph() -> dict[str, set[str]]:
    """Every module with our modules that it imports; packages under their own names."""
    files = {}
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(["outrider", *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return {name: imported_modules(path) & set(files) - {name} for name, path in files.items()}


def test_imports_have_no_cycles(import_graph):
    # `from . import name` shows a package as an import of its own modules.
    inner = {
        name: {other for other in found if not name.startswith(f"{other}.")} for name, found in import_graph.items()
    }
    assert len(list(TopologicalSorter(inner).static_order())) == len(inner)  # CycleError names the circle


def test_no_folder_imports_its_sibling_both_ways(import_graph):
    pairs = {pair for name, found in import_graph.items() for other in found if (pair := _siblings(name, other))}
    assert ("outrider.drafters", "outrider.kernels") in pairs
    assert not {pair for pair in pairs if pair[::-1] in pairs}


def _siblings(name: str, other: str) -> tuple[str, str] | None:
    """The folders below their common one of two modules; None if a module is in no folder."""
    a, b = name.split("."), other.split(".")
    depth = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    folders = ".".join(a[: depth + 1]), ".".join(b[: depth + 1])
    inside = all((ROOT / Path(*folder.split(".")[1:]) / "__init__.py").exists() for folder in folders)
    return folders if inside and min(len(a), len(b)) > depth else None


@pytest.mark.parametrize("library", ONLY_IN)
def test_libraries_stay_in_their_folder(library):
    home = ROOT / ONLY_IN[library]
    for folder in MAY_IMPORT:
        for path, name in imports(folder):
            assert name.split(".")[0] != library or path.is_relative_to(home), f"{path} imports {name}"


def test_sglang_waits_for_the_engine():
    """SGLang and prometheus_client read on import the environment that starting the engine sets."""
    code = f"import sys, {', '.join(BEFORE_THE_ENGINE)}; print({{'sglang', 'prometheus_client'}} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.stdout.strip() == "set()", shown.stdout + shown.stderr


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for folder in (*MAY_IMPORT, "deploy"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
