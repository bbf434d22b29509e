"""The learner's process: it runs while the engine is idle, and is paused while requests run."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from ..model.target import plain_folder
from ..prompt_files import BUILT_IN
from ..settings.learning import START
from ..settings.settings import Settings
from .process import PR_SET_PDEATHSIG

BOUND_TO_PARENT = (
    f"import ctypes, runpy; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}); "
    "runpy.run_module('outrider.drafters.learning.process', run_name='__main__')"
)
"""Code of a learner that dies with its parent, even if it is paused right after its start."""


class LearnerProcess:
    """A process that trains the drafter (`drafters/learning/process.py`), at the lowest priority.

    It ends with this process. However it ends, its folder stays intact.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.learn_folder is not None
        folder, path = settings.learn_folder, str(settings.drafter_path)
        self.command = [sys.executable, "-c", BOUND_TO_PARENT]
        self.command += ["--folder", str(folder), "--target", plain_folder(settings.model), "--kind", settings.drafter]
        self.command += ["--start", "target" if Path(path) == folder / START else path, "--general", str(BUILT_IN)]
        self.command += ["--threads", str(settings.learn_threads), "--device", settings.learn_device]
        self.command += ["--dtype", "float32" if settings.resolved_dtype == "float32" else "bfloat16"]
        self.command += ["--denoising-steps", str(settings.resolved_denoising_steps)]
        self.command += ["--lookup-gamma", str(settings.plugin_config.lookup_gamma)]
        self.command += ["--per", settings.learn_per, "--keys", str(settings.learn_keys)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or restart the process."""
        environment = {**os.environ, "OMP_NUM_THREADS": self.command[self.command.index("--threads") + 1]}
        environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
        self._process = subprocess.Popen(self.command, env=environment, stdin=subprocess.DEVNULL)

    @property
    def running(self) -> bool:
        """True from the start of the process to its end."""
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
