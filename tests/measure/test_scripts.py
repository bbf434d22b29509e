"""The scripts of this folder explain themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SCRIPTS = [path.name for path in FOLDER.glob("[!t]*.py") if "script.main(" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_explains_itself(name: str) -> None:
    done = subprocess.run([sys.executable, FOLDER / name, "--help"], capture_output=True, text=True, check=True)
    assert f"python tests/measure/{name}" in done.stdout
