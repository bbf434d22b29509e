"""Check in a separate process that SGLang loads our plugin.

Importing SGLang takes seconds, during which the other checks run, and a broken SGLang may crash.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

from .finding import Finding, ok, problem

LOAD = "from outrider.server.processes.engine import load_plugin; load_plugin()"


def start() -> subprocess.Popen[str]:
    """Start the process; `finding` waits for its end."""
    command = [sys.executable, "-P", "-c", LOAD]  # -P: import no packages from the current folder
    env = {"SGLANG_PLUGINS": "outrider"} | os.environ
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)


def finding(process: subprocess.Popen[str]) -> Iterator[Finding]:
    _, stderr = process.communicate()
    if process.returncode == 0:
        yield ok("plugin", f"loaded by SGLang {version('sglang')}")
        return
    reason = (stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    remedy = "unset SGLANG_PLUGINS and SGLANG_PLATFORM, or install the packages again (docs/operate.md)"
    yield problem("plugin", f"SGLang does not load it: {reason.removeprefix('outrider.server.errors.')}", remedy)
