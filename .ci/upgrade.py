#!/usr/bin/env python3
"""The pins of deploy/requirements, moved to the newest versions that pyproject.toml and the packages allow each other.

    .ci/upgrade.py PACKAGE COMMAND…   move one, and more only where it requires that; "" moves all
    .ci/upgrade.py                    print changes of the locks since the last commit

COMMAND is `uv pip compile` with flags. `make upgrade` calls it. No file is written unless all sets can be resolved.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("deploy/requirements")
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
COMMON, CPU, TORCH_CPU, CHECKERS = "common.pins", "cpu.in", "torch-cpu.txt", "check-deploy.in"
WITH_CUDA = (COMMON, "cuda.in", "dev.in", "traces.in")
"""Resolved together first, since with CUDA torch is SGLang's own. Packages shared with CPUs are then fixed."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(*texts: str) -> dict[str, str]:
    """Versions by canonical name."""
    return {canonical(name): version for text in texts for name, version in PIN.findall(text)}


def ranges() -> list[str]:
    """Requirements of pyproject.toml, including its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]


def newest(command: list[str], now: dict[str, str], requirements: list[str]) -> dict[str, str]:
    """Versions by name of all that `requirements` and the packages of `now` need, none of which goes back.

    Ends the process where no versions go together.
    """
    with TemporaryDirectory() as folder:
        asked, found = Path(folder, "asked.in"), Path(folder, "found.txt")
        asked.write_text("\n".join([*requirements, *(f"{name}>={version}" for name, version in now.items())]))
        found.write_text("\n".join(f"{name}=={version}" for name, version in now.items()))  # uv prefers these
        command = [*command, str(asked), "--output-file", str(found)]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(f"No pin was moved, for uv finds no versions that go together:\n{ran.stderr.strip()}")
        return pins(found.read_text())


def upgrade(package: str, command: list[str]) -> None:
    texts = {name: (ROOT / FOLDER / name).read_text() for name in (*WITH_CUDA, CPU, CHECKERS)}
    if package and canonical(package) not in pins(*texts.values()):
        sys.exit(f"{FOLDER} has no pin of {package}")
    command = [*command, *(["--upgrade-package", package] if package else ["--upgrade"])]
    with_cuda = newest(command, pins(*(texts[name] for name in WITH_CUDA)), ranges())
    shared = [f"{name}=={with_cuda[name]}" for name in pins(texts[COMMON])]
    cpu = newest([*command, "--overrides", str(FOLDER / TORCH_CPU)], pins(texts[CPU]), [*ranges(), *shared])
    checkers = newest(command, pins(texts[CHECKERS]), [])
    for name, text in texts.items():
        found = {CPU: cpu, CHECKERS: checkers}.get(name, with_cuda)
        moved = PIN.sub(lambda pin, found=found: f"{pin[1]}=={found[canonical(pin[1])]}", text)
        (ROOT / FOLDER / name).write_text(moved)


def committed(lock: str) -> str:
    """The lock in the last commit; empty where there is none."""
    command = ["git", "show", f"HEAD:{FOLDER / lock}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def table() -> str:
    """A line for each package of another version than in the last commit, with the locks that have it."""
    locks: dict[tuple[str, str, str], list[str]] = {}
    for path in sorted((ROOT / FOLDER).glob("*.txt")):
        before, after = pins(committed(path.name)), pins(path.read_text())
        for name in before.keys() | after.keys():
            if (was := before.get(name, "–")) != (now := after.get(name, "–")):
                locks.setdefault((name, was, now), []).append(path.stem)
    if not locks:
        return "The locks have the versions of the last commit."
    rows = [("package", "before", "after", "locks"), *((*key, " ".join(names)) for key, names in sorted(locks.items()))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    if sys.argv[1:]:
        upgrade(sys.argv[1], sys.argv[2:])
    else:
        print(table())
