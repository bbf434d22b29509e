"""SGLang's launcher uses only the replaced parts of `multiprocessing`."""

import ast
import json
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from running import environment

from outrider.server.processes.prefork import WaitingScheduler

STAND_IN = Path(__file__).parents[2] / "support" / "stand_in.py"


def test_the_launcher_wants_a_pipe_and_a_process() -> None:
    source = distribution("sglang").locate_file("sglang/srt/entrypoints/engine.py")
    tree = ast.parse(Path(str(source)).read_text())
    (launch,) = (
        function
        for owner in tree.body
        if isinstance(owner, ast.ClassDef) and owner.name == "Engine"
        for function in owner.body
        if isinstance(function, ast.FunctionDef) and function.name == "_launch_scheduler_processes"
    )
    wanted = {
        node.attr
        for node in ast.walk(launch)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mp"
    }
    assert wanted == {name for name in vars(WaitingScheduler) if not name.startswith("_")} == {"Pipe", "Process"}


@pytest.mark.slow
def test_sglang_launches_a_prestarted_process() -> None:
    """It gets SGLang's arguments, the current environment, and a pipe."""
    done = subprocess.run(
        [sys.executable, STAND_IN], capture_output=True, text=True, timeout=200, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["same_process"]
    assert answer["told"] == {"model": "SmolLM2-135M-Instruct", "ranks": [0, 0, 0, None]}
    assert answer["ports"]
    assert answer["environment"] == "after it was started"
    assert answer["exit_code"] == 0
    assert answer["module_is_back"]
