"""Runs test programs in separate processes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from running import environment
from server_forks import Forks

from outrider.server.machine import hardware


def found_by(program: Path, *arguments: str) -> Any:
    """The last line of a Python program with this process's import path, read as JSON."""
    run = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def found_by_fork(program: Path, *arguments: str) -> Any:
    """The result of a program's `main`, in a fork of a process with an engine's imports where possible."""
    if hardware.has_gpu():
        return found_by(program, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        env = environment(PROMETHEUS_MULTIPROC_DIR=folder)
        code = Forks.of(environment()).start(arguments, env, output, errors, program).wait()
        assert code == 0, errors.read_text()[-4000:]
        return json.loads(output.read_text().splitlines()[-1])


INTERPRETED = """
import sys
import pytest
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))
sys.exit(pytest.main(sys.argv[1:]))
"""


def pass_interpreted(folder: Path, *flags: str, without: str = "", **env: str) -> None:
    """Assert that the folder's tests pass in Triton's interpreter.

    without: names of modules that cannot be imported.
    """
    flags = "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", *flags
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED, without, str(folder), *flags],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
