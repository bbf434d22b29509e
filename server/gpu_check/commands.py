"""Steps that run commands of ours, each in processes of its own, which end at the latest with the part's time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import outrider.profiles

from ..errors import UserError
from .device import Device

PROMPTS = Path(outrider.profiles.__file__).parent / "prompts.jsonl"
OUTRIDER = (sys.executable, "-m", "outrider.server.cli.main")
END_SECONDS = 20
"""For a process that was asked to end."""


class NotReached(Exception):
    """The part's time was up before the end of a step."""


@dataclass(frozen=True, slots=True)
class Commands:
    """device: what they run on. folder: for their files and logs, kept from call to call. out: for what is to be
    taken away. end: of the part's time, on the monotonic clock."""

    device: Device
    folder: Path
    out: Path
    end: float

    @property
    def tiny(self) -> bool:
        return self.device.tiny

    @property
    def seconds(self) -> float:
        """That are left."""
        return self.end - time.monotonic()

    def outrider(self, name: str, *arguments: str | Path, **environment: str) -> None:
        """Run a command of ours on the device; raises NotReached, and UserError where it fails."""
        if code := self.run(name, [*OUTRIDER, *arguments], **environment):
            raise UserError(f"outrider {arguments[0]} ended with {code}: {self.last_line(name)}")

    def run(self, name: str, command: Sequence[str | Path], **environment: str) -> int:
        """Exit code of the command, whose output goes to NAME.log; raises NotReached."""
        with self._log(name) as log, self._started(command, log, environment) as process:
            try:
                return process.wait(max(0.0, self.seconds))
            except subprocess.TimeoutExpired:
                raise NotReached from None

    @contextlib.contextmanager
    def server(self, name: str, *flags: str | Path, **environment: str) -> Iterator[str]:
        """URL of a server that is ready; raises NotReached, and UserError where it does not become so."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        command = [*OUTRIDER, "serve", "--device", self.device.on.type, "--port", str(port), "--no-tune", *flags]
        with self._log(name) as log, self._started(command, log, environment) as process:
            while not _answers(url):
                if process.poll() is not None:
                    raise UserError(f"the server ended with {process.returncode}: {self.last_line(name)}")
                if self.seconds < 0:
                    raise NotReached
                time.sleep(0.5)
            yield url

    def read(self, name: str) -> Any:
        """The results that a command wrote to NAME.json."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))["results"]

    def last_line(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def _log(self, name: str) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return (self.folder / f"{name}.log").open("wb")

    @contextlib.contextmanager
    def _started(
        self, command: Sequence[str | Path], log: IO[bytes], environment: dict[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        self.device.release()
        surroundings = self.device.environment | {"HF_HUB_OFFLINE": "1"} | environment
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=surroundings,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it has left
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
