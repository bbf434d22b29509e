#!/usr/bin/env python3
"""Lines of product code per folder and words of Markdown, against the budgets in budget.toml.

    .ci/budget.py             print excesses of budgets, exit 1 if there are any
    .ci/budget.py --table     print everything

A change that exceeds a budget raises it in the same commit and says there why.
"""

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = {".py", ".cpp", ".h", ".js", ".css", ".html"}
NO_PRODUCT = ("tests/", "docs/", ".ci/")


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (Path(name) for name in names.split("\0") if name)
    return [path for path in paths if (ROOT / path).is_file() and "vendor" not in path.parts]


def folder_of(path: Path, folders: set[str]) -> str:
    """The deepest folder with a budget of its own that the file is in; "." for none."""
    return next((str(parent) for parent in path.parents if str(parent) in folders), ".")


def count(budgets: dict[str, dict[str, int]]) -> list[tuple[str, int, int]]:
    """Name, amount and budget of everything counted; a missing budget is 0."""
    lines, words = Counter[str](), Counter[str]()
    folders = set(budgets["lines"])
    for path in tracked():
        if path.suffix in CODE and not str(path).startswith(NO_PRODUCT):
            number = (ROOT / path).read_text().count("\n")
            lines[folder_of(path, folders)] += number
            lines["all"] += number
        elif path.suffix == ".md":
            number = len((ROOT / path).read_text().split())
            words["all"] += number
            if str(path) in budgets["words"]:
                words[str(path)] += number
    return [
        *((f"lines of {name}", number, budgets["lines"].get(name, 0)) for name, number in sorted(lines.items())),
        *((f"words of {name}", number, budgets["words"].get(name, 0)) for name, number in sorted(words.items())),
    ]


def main() -> int:
    counts = count(tomllib.loads((ROOT / ".ci" / "budget.toml").read_text()))
    for name, number, budget in counts:
        if number > budget or "--table" in sys.argv:
            print(f"{name}: {number} of {budget}")
    if over := any(number > budget for _, number, budget in counts):
        print("take something out, or raise the budget in .ci/budget.toml and say why in the commit's message")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
