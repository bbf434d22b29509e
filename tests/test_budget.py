"""The budget of lines and words in `make lint` (.ci/budget.py), on a small repository."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
BUDGET = """
[lines]
all = 5
"." = 0
kernels = 2
"kernels/cpu" = 3
[words]
all = 4
"README.md" = 3
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    files = {
        ".ci/budget.toml": BUDGET, "kernels/a.py": "1\n2\n", "kernels/cpu/csrc/b.h": "1\n2\n3\n",
        "kernels/vendor/c.js": "1\n" * 9, "kernels/untracked.py": "1\n", "tests/d.py": "1\n" * 9,
        "README.md": "one two three", "docs/e.md": "four",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(CI / "budget.py", tmp_path / ".ci")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "--", *(name for name in files if "untracked" not in name)], cwd=tmp_path, check=True)
    return tmp_path


def budget(repository: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, repository / ".ci" / "budget.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_tree_within_its_budget_passes_silently(repository: Path) -> None:
    assert budget(repository) == (0, "")
    assert "lines of kernels/cpu: 3 of 3" in budget(repository, "--table")[1]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("kernels/a.py", "1\n2\n3\n", "lines of all: 6 of 5\nlines of kernels: 3 of 2\n"),
        ("kernels/cpu/csrc/b.h", "1\n2\n3\n4\n", "lines of all: 6 of 5\nlines of kernels/cpu: 4 of 3\n"),
        ("new/f.py", "1\n", "lines of .: 1 of 0\nlines of all: 6 of 5\n"),
        ("README.md", "one two three four", "words of README.md: 4 of 3\nwords of all: 5 of 4\n"),
        ("docs/e.md", "four five", "words of all: 5 of 4\n"),
    ],
)
def test_exceeding_folders_fail_and_are_named(repository: Path, name: str, text: str, says: str) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text)
    subprocess.run(["git", "add", "--", name], cwd=repository, check=True)
    code, said = budget(repository)
    assert (code, said.startswith(says)) == (1, True), said
    assert said.removeprefix(says).startswith("take something out, or raise the budget")
