"""pyproject.toml names all imported packages, and the locks in deploy/requirements satisfy it."""

import ast
import os
import re
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "deploy" / "requirements"
FOLDERS = ("drafters", "kernels", "profiles", "scheduler", "server")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {extra: [Requirement(line) for line in lines] for extra, lines in PROJECT["optional-dependencies"].items()}
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
OPTIONAL = {"matplotlib"}
"""Imported where used, with an error or an alternative if missing."""
BY_NAME = {"python-json-logger", "uvloop"}
"""Imported by logging and uvicorn, by name."""


def distributions_imported(*folders: str) -> set[str]:
    """Packages that the code in `folders` imports, anywhere in a file."""
    ours = {"outrider"} | {path.stem for path in (ROOT / "tests").rglob("*.py")}
    modules = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules.add(node.module.partition(".")[0])
    installed = packages_distributions()
    return {
        canonicalize_name(installed.get(module, [module])[0]) for module in modules - sys.stdlib_module_names - ours
    }


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


def pins(lock: str) -> dict[str, str]:
    """Versions by canonical name, of a file in deploy/requirements with its includes."""
    text = (LOCKS / lock).read_text()
    versions = {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    }
    for other in re.findall(r"^-r (\S+)", text, re.MULTILINE):
        versions |= pins(other)
    return versions


def test_exactly_the_codes_imports_are_declared() -> None:
    imported, declared = distributions_imported(*FOLDERS), names(DEPENDENCIES) | OPTIONAL
    assert sorted(imported - declared) == []
    assert sorted(declared - imported - BY_NAME) == []
    assert sorted(OPTIONAL - {name for extra in EXTRAS.values() for name in names(extra)}) == []


def test_the_tests_imports_are_declared() -> None:
    peers = set(pins(str(ROOT / "tests" / "measure" / "peers" / "openvino.txt")))  # its server has its own environment
    assert sorted(distributions_imported("tests") - names(DEPENDENCIES) - names(EXTRAS["dev"]) - OPTIONAL - peers) == []


@pytest.mark.parametrize("name", sorted(path.stem for path in LOCKS.glob("*.in")))
def test_locks_have_the_pins_and_a_hash_of_every_file(name: str) -> None:
    assert pins(f"{name}.txt") == pins(f"{name}.in")
    requirements = re.split(r"\n(?! )", (LOCKS / f"{name}.txt").read_text().strip())
    assert len(requirements) == len(pins(f"{name}.txt"))
    assert all("--hash=sha256:" in requirement for requirement in requirements)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_locked_versions_are_allowed(device: str) -> None:
    """On CPUs torch differs from SGLang's pin."""
    locked = pins(f"{device}.txt") | pins("dev.txt") | (pins("torch-cpu.txt") if device == "cpu" else {})
    for requirement in [*DEPENDENCIES, *(line for name in EXTRAS if name != "cuda" for line in EXTRAS[name])]:
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}, locked is {version}"
    if device == "cuda":
        assert all(line.specifier.contains(locked[canonicalize_name(line.name)]) for line in EXTRAS["cuda"])


def test_the_tests_packages_have_all_that_they_need() -> None:
    locked = pins("cpu.txt") | pins("torch-cpu.txt") | pins("dev.txt")
    missing = {
        f"{name} needs {needed.name}"
        for name in pins("dev.in")
        for needed in map(Requirement, distribution(name).requires or [])
        if (needed.marker is None or needed.marker.evaluate({"extra": ""}))
        and canonicalize_name(needed.name) not in locked
    }
    assert missing == {"mooncake-transfer-engine-non-cuda needs msgpack"}  # SGLang's transfers do not use it


def test_xdist_knows_the_groups_of_tests(request: pytest.FixtureRequest) -> None:
    """Otherwise each worker would start all servers."""
    config = request.config
    if "PYTEST_XDIST_WORKER" not in os.environ or not config.getoption("loadgroup", False):
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith(f"@{request.path.relative_to(config.rootpath)}")
