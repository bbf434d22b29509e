"""`make test` installs the Debian packages of tests once, if it can."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEM = ("bash", "id", "mkdir", "touch", "env", "cat", "sha256sum", "cut", "chmod", "cp", "true")
INSTALLS = 'for name; do :; done; cp {folder}/true {folder}/"$name"'


class Machine:
    """A private PATH with a scripted apt-get."""

    def __init__(self, folder: Path, apt_get: str) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        for name in SYSTEM:
            (self.folder / name).symlink_to(str(shutil.which(name)))
        (self.folder / "sudo").write_text('#!/bin/bash\nshift\nexec "$@"\n')
        self.calls = folder / "calls"
        self.calls.touch()
        script = f'#!/bin/bash\necho "$@" >> {self.calls}\n{apt_get.format(folder=self.folder)}\n'
        (self.folder / "apt-get").write_text(script)
        for name in ("sudo", "apt-get"):
            (self.folder / name).chmod(0o755)
        self.venv = folder / "venv"

    def make(self) -> str:
        command = [str(shutil.which("make")), "-s", "programs", "PROGRAMS=browser", f"VENV={self.venv}"]
        environment = {"PATH": str(self.folder)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def test_missing_packages_are_installed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, INSTALLS)
    assert machine.make() == "Installing Debian's browser, which tests use (once)\n"
    update, install = machine.calls.read_text().splitlines()
    assert update.endswith("update")
    assert install.endswith("install --no-install-recommends -y browser")
    assert machine.make() == ""


def test_a_machine_without_a_network_is_tried_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "exit 100")
    skipped = "Tests of browser are skipped: not installed (apt-get install browser)\n"
    assert machine.make().endswith(skipped)
    assert len(machine.calls.read_text().splitlines()) == 1
    assert machine.make() == skipped
    assert len(machine.calls.read_text().splitlines()) == 1


def test_a_missing_apt_get_is_reported(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "")
    (machine.folder / "apt-get").unlink()
    assert machine.make() == "Tests of browser are skipped: not installed (apt-get install browser)\n"
