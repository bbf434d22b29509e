"""Runs the tests of `interpreted/` in a process of their own: Triton reads as it is imported whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path


def test_attention_backends_through_the_interpreter():
    folder = Path(__file__).parent / "interpreted"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(folder), "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
