"""`make upgrade` moves pins to the newest allowed versions, and prints the changes (.ci/upgrade.py)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UPGRADE = Path(__file__).parents[1] / ".ci" / "upgrade.py"
PROJECT = """
[project]
dependencies = ["engine>=1,<2", "torch>=2", "triton>=3", "web>=1"]
[project.optional-dependencies]
dev = ["tester==1.0", "web>=1,<3"]
"""
FILES = {
    "common.pins": "# Shared.\nengine==1.0  # theirs\nweb_Tools==1.0\nweb==1.0\n",
    "cuda.in": "-r common.pins\ntorch==2.1\ntriton==3.1\n",
    "cpu.in": "-r common.pins\ntriton==3.0\n",
    "torch-cpu.txt": "torch==2.0\n",
    "dev.in": "-r traces.in\ntester==1.0\n",
    "traces.in": "spans==1.0\n",
    "check-deploy.in": "web==1.0\n",
}
INDEX = {
    "engine": {"1.0": ["torch==2.1"], "1.1": ["torch==2.2", "web-tools<2"], "2.0": []},
    "torch": {"2.0": ["triton==3.0"], "2.1": ["triton==3.1"], "2.2": ["triton==3.2"]},
    "triton": {"3.0": [], "3.1": [], "3.2": [], "3.3": []},
    "web": {"1.0": [], "2.0": ["web-tools>=1.5"], "3.0": []},
    "web-tools": {"1.0": [], "1.5": [], "2.0": []},
    "tester": {"1.0": [], "2.0": []},
    "spans": {"1.0": [], "1.1": []},
}
"""Versions with their requirements."""
UV = f"""
import sys
from pathlib import Path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

index, (*flags, asked, _, found) = {INDEX!r}, sys.argv[1:]
read = lambda path: [Requirement(line) for line in Path(path).read_text().split("\\n") if line]
preferred = {{canonicalize_name(each.name): str(each.specifier)[2:] for each in read(found)}}
moves = {{flags[1]}} if flags[0] == "--upgrade-package" else set(index)
overrides = {{each.name: each for each in read(flags[-1])}} if "--overrides" in flags else {{}}
wanted = read(asked)
for _ in index:
    chosen = {{}}
    for name in {{canonicalize_name(each.name) for each in wanted}}:
        allowed = [overrides.get(name, each).specifier for each in wanted if canonicalize_name(each.name) == name]
        fit = [version for version in index[name] if all(version in each for each in allowed)]
        if not fit:
            sys.exit(f"no {{name}} fits")
        stays = preferred.get(name) in fit and name not in moves
        chosen[name] = preferred[name] if stays else max(fit, key=Version)
    wanted = read(asked) + [Requirement(line) for name in chosen for line in index[name][chosen[name]]]
Path(found).write_text("".join(f"{{name}}=={{version}}\\n" for name, version in chosen.items()))
"""
"""A resolver of INDEX with uv's arguments."""

TOGETHER = "No pin was moved, for uv finds no versions that go together:\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "deploy" / "requirements"
    for path in (folder, tmp_path / ".ci"):
        path.mkdir(parents=True)
    shutil.copy(UPGRADE, tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "uv.py").write_text(UV)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return tmp_path


def upgrade(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, project / ".ci" / "upgrade.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def moved(project: Path, package: str = "") -> dict[str, str]:
    """Texts of the changed files."""
    done = upgrade(project, package, sys.executable, str(project / "uv.py"))
    assert (done.returncode, done.stderr) == (0, "")
    texts = {name: (project / "deploy" / "requirements" / name).read_text() for name in FILES}
    return {name: text for name, text in texts.items() if text != FILES[name]}


def test_all_move_to_the_newest_that_fit_together(project: Path) -> None:
    """CPUs keep their torch."""
    assert moved(project) == {
        "common.pins": "# Shared.\nengine==1.1  # theirs\nweb_Tools==1.5\nweb==2.0\n",
        "cuda.in": "-r common.pins\ntorch==2.2\ntriton==3.2\n",
        "traces.in": "spans==1.1\n",
        "check-deploy.in": "web==3.0\n",
    }


def test_a_package_moves_with_its_requirements(project: Path) -> None:
    assert moved(project, "engine") == {
        "common.pins": FILES["common.pins"].replace("engine==1.0", "engine==1.1"),
        "cuda.in": "-r common.pins\ntorch==2.2\ntriton==3.2\n",
    }


@pytest.mark.parametrize(
    ("package", "pyproject", "says"),
    [("absent", PROJECT, "deploy/requirements has no pin of absent"),
     ("", PROJECT.replace("<2", "<1.0"), f"{TOGETHER}no engine fits"),
     ("", PROJECT.replace("triton>=3", "triton>=3.1"), f"{TOGETHER}no triton fits")],
)  # fmt: skip
def test_no_file_is_written_on_failure(project: Path, package: str, pyproject: str, says: str) -> None:
    (project / "pyproject.toml").write_text(pyproject)
    done = upgrade(project, package, sys.executable, str(project / "uv.py"))
    assert done.returncode == 1
    assert done.stderr.startswith(says)
    assert all((project / "deploy" / "requirements" / name).read_text() == text for name, text in FILES.items())


def test_the_table_lists_the_changes_of_the_locks(project: Path) -> None:
    locks = project / "deploy" / "requirements"
    for name in ("cpu", "cuda"):
        (locks / f"{name}.txt").write_text("engine==1.0 \\\n    --hash=sha256:0\ngone==1!2.0 \\\n    --hash=sha256:1\n")
    for command in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "before"]):
        subprocess.run(["git", *command], cwd=project, check=True, capture_output=True)
    assert upgrade(project).stdout == "The locks have the versions of the last commit.\n"
    (locks / "cpu.txt").write_text("engine==1.1 \\\n    --hash=sha256:2\ngone==1!2.0 \\\n    --hash=sha256:3\n")
    (locks / "cuda.txt").write_text("engine==1.1 \\\n    --hash=sha256:2\nWeb_Tools==1.5 \\\n    --hash=sha256:4\n")
    assert upgrade(project).stdout.splitlines() == [
        "package    before  after  locks",
        "engine     1.0     1.1    cpu cuda",
        "gone       1!2.0   –      cuda",
        "web-tools  –       1.5    cuda",
    ]
