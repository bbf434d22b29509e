"""Check in a separate process that SGLang loads our plugin.

Importing SGLang takes seconds, while the other checks run; and a broken one may crash.
"""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version

from ..errors import UserError
from .finding import Finding, ok, problem
from .installation import REINSTALL

NOT_LOADED = 3
"""The process's exit code where SGLang is right and did not load us; its output says why."""


def start() -> subprocess.Popen[str]:
    """Start the process; `finding` waits for its end."""
    command = [sys.executable, "-P", "-m", __name__]  # -P: the folder it is called in holds no packages
    env = {"SGLANG_PLUGINS": "outrider"} | os.environ
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finding(process: subprocess.Popen[str]) -> Iterator[Finding]:
    stdout, stderr = process.communicate()
    if process.returncode == 0:
        yield ok("plugin", f"loaded by SGLang {version('sglang')}")
    elif process.returncode == NOT_LOADED:
        remedy = "unset SGLANG_PLUGINS and SGLANG_PLATFORM; then `pip install --no-deps .` again"
        yield problem("plugin", stdout.strip(), remedy)
    else:
        reason = (stderr.strip().splitlines() or [""])[-1]
        if process.returncode < 0:
            reason = f"ended by {signal.Signals(-process.returncode).name}"
        yield problem("plugin", f"SGLang cannot be imported: {reason}", REINSTALL)


def _load() -> int:
    from ..processes.engine import load_plugin

    warnings.simplefilter("ignore")  # of hardware that is not here
    try:
        load_plugin()
    except UserError as error:
        print(error)
        return NOT_LOADED
    return 0


if __name__ == "__main__":
    sys.exit(_load())
