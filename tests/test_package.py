"""The built package equals the tree, and SGLang loads the plugin from it."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path, PurePath

import pytest
from running import environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FOLDERS = ("drafters", "kernels", "profiles", "scheduler", "server", "storage")
TAKES_PART = (".src", *FOLDERS, "pyproject.toml", "README.md", "LICENSE")
DATA = ("drafters/weights", "kernels/cpu/csrc", "profiles/shipped", "server/http/page")
"""Folders that are installed completely."""
MADE = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", "*.egg-info", "build")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that a build leaves no file in the checkout."""
    copy = tmp_path_factory.mktemp("tree")
    for name in TAKES_PART:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=MADE)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


def build_wheel(source: Path, folder: Path) -> Path:
    python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def python(*arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed_files(wheel: Path) -> set[str]:
    """Names in the package, without pip's own records."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"outrider", wheel.name.split("-py3")[0] + ".dist-info"}
    return {name.removeprefix("outrider/") for name in names if name.startswith("outrider/")}


def is_installed(path: PurePath) -> bool:
    """Everything except files that are read in the repository."""
    return path.suffix not in (".md", ".png") or any(path.is_relative_to(folder) for folder in DATA)


def test_the_wheel_holds_the_tree(tree: Path, wheel: Path) -> None:
    files = [path.relative_to(tree) for folder in FOLDERS for path in (tree / folder).rglob("*") if path.is_file()]
    expected = {"__init__.py"} | {str(path) for path in files if is_installed(path)}
    installed = installed_files(wheel)
    assert sorted(expected - installed) == [], "a folder without __init__.py, or data that pyproject.toml does not name"
    assert sorted(installed - expected) == []


def test_a_wheel_can_be_built_from_the_sdist(tree: Path, wheel: Path, tmp_path: Path) -> None:
    """The links of `.src` are files there."""
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    python("-c", build, str(tmp_path), cwd=tree)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # missing in Python 3.11.2
        archive.extractall(tmp_path)
    again = build_wheel(tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)
    assert installed_files(again) == installed_files(wheel)


# as SGLang's processes begin; sys.argv: where to find packages, ours first
LOAD = """
import json, sys
sys.path += sys.argv[1:]
from importlib.metadata import distribution, entry_points
from sglang.srt.plugins import load_plugins
from sglang.srt.platforms import current_platform
load_plugins()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
import outrider.server.plugin.hooks.register
(command,) = entry_points(group="console_scripts", name="outrider")
print(json.dumps({
    "package": outrider.__file__,
    "metadata": str(distribution("outrider").locate_file("")),
    "command": command.load().__module__,
    "platform": type(current_platform).__module__,
    "algorithm": type(SpeculativeAlgorithm.from_string("OUTRIDER")).__module__,
}))
"""


def test_sglang_loads_the_installed_plugin(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    python("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    monkeypatch.setenv("SGLANG_PLUGINS", "outrider")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # with a GPU, SGLang would choose its own platform
    # neither PYTHONPATH nor an editable install leads to the checkout
    packages = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    loaded = json.loads(python("-I", "-S", "-c", LOAD, str(site), *packages, cwd=tmp_path).splitlines()[-1])
    assert Path(loaded.pop("package")) == site / "outrider" / "__init__.py"
    assert Path(loaded.pop("metadata")) == site
    assert loaded == {
        "command": "outrider.server.cli.main",
        "platform": "outrider.server.plugin.hooks.platform",
        "algorithm": "outrider.server.plugin.hooks.algorithm",
    }
