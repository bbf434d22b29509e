import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import httpx
import openai
import psutil
import pytest
from server_forks import CHANGED, CHANGES, ForkedProcess, Forks

from outrider.server.machine import hardware

OUTRIDER = Path(sys.executable).with_name("outrider")
NOT_DEFAULT = {
    "--no-tune": "measuring takes minutes, and gives each run of the tests another profile",
    "--sampling-defaults openai": "requests that name no sampling have temperature 1, whatever a model's folder says",
    "--activations float": "rounded activations differ between processors, and answers are compared with exact ones",
}
"""Flags that every test server changes, with the reason."""
PLAIN = tuple(word for flag in NOT_DEFAULT for word in flag.split())
TURNED_OFF = {
    "--disable-radix-cache": "prompts are read in the same pieces each time, so that sums have one order",
    "--no-lookup": "a drafter's model drafts everything, and is what a test is about",
    "--no-lookup-across": "drafts are counted by their source, or compared, for prompts that are asked again",
}
"""Defaults that some test servers turn off, with the reason."""
ONE_THREAD = () if hardware.has_gpu() else ("--threads", "1")
"""Servers of small models use it: a second thread does not speed them up."""
# far longer than a start takes: test machines are busy
START_SECONDS = 180
HTTP = httpx.Client(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
"""A connection for each request, as `httpx.get`, without its 30 ms for reading certificates."""


TAKES_MANY = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
"""Lets a request in when the cache has room for this much of its answer, so that some are retracted. No effect with
`ignore_eos`, where SGLang waits for room for all."""


def changed(*names: str) -> dict[str, str]:
    """This process's environment with these changes of servers; see `changed_servers/`."""
    path = [CHANGED, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), CHANGES: " ".join([*os.environ.get(CHANGES, "").split(), *names])}


def overlaps() -> bool:
    """Tell whether servers overlap scheduling with the forward (`--overlap`)."""
    return "overlap" in os.environ.get(CHANGES, "").split()


class Server:
    THREADS: ClassVar[tuple[str, ...]] = ()
    may_fail = False
    """Parts of its speculation may fail; otherwise that fails the test, since answers do not show it."""

    def __init__(self, log: Path, *flags: str, **env: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        words = ["serve", "--port", str(self.port), *PLAIN, *self.THREADS, *flags]
        self.overlaps = "overlap" in (env.get(CHANGES) or os.environ.get(CHANGES, "")).split()
        self.process = self._start(words, environment(**env))

    def _start(self, arguments: list[str], env: dict[str, str]) -> subprocess.Popen[bytes] | ForkedProcess:
        return start(arguments, env, self.log, self.log)

    def wait_until_ready(self) -> Self:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.output()}")
            if self.status("/ready") == 200:
                assert ("this scheduler's steps overlap" in self.output()) == self.overlaps
                return self
            time.sleep(0.2)
        self.kill()
        pytest.fail(f"the server was not ready after {START_SECONDS} s:\n{self.output()}")

    def __enter__(self) -> Self:
        """Wait until the server is ready; leaving the context stops it."""
        return self.wait_until_ready()

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def status(self, path: str) -> int | None:
        """Status of a GET; None without an answer."""
        try:
            return HTTP.get(self.url + path, timeout=5).status_code
        except httpx.TransportError:
            return None

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> Any:
        """The JSON that answers a request to /v1/."""
        answer = HTTP.post(f"{self.url}/v1/{path}", json=body, timeout=120)
        assert answer.status_code == status, answer.text
        return answer.json()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a chat or completion, as they come."""
        with HTTP.stream("POST", f"{self.url}/v1/{path}", json=body | {"stream": True}, timeout=120) as answer:
            yield from (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))

    def send(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, **{"timeout": 600} | options)

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "unused", "max_retries": 0} | options)

    def children(self) -> dict[str, psutil.Process]:
        return engine_processes(self.process.pid)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """Exit code after SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert self.may_fail or not self.failures(), self.failures()
        return code

    def kill(self) -> None:
        """Kill the server with all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
        assert self.may_fail or not self.failures(), self.failures()

    def failures(self) -> list[str]:
        """Log lines about failed parts of speculation."""
        return [line for line in self.output().splitlines() if "answers stay exact" in line]


class ForkedServer(Server):
    """A forked server of one thread: see `server_forks.py`. On a GPU it starts as usual."""

    THREADS = ONE_THREAD

    def _start(self, arguments: list[str], env: dict[str, str]) -> subprocess.Popen[bytes] | ForkedProcess:
        return start_forked(arguments, env, self.log, self.log)


def start(arguments: Sequence[str], env: Mapping[str, str], output: Path, errors: Path) -> subprocess.Popen[bytes]:
    """Start the command `outrider` with its output in files."""
    with output.open("ab") as out, errors.open("ab") as err:
        return subprocess.Popen([OUTRIDER, *arguments], stdout=out, stderr=err, env=env, start_new_session=True)


def start_forked(
    arguments: Sequence[str], env: Mapping[str, str], output: Path, errors: Path
) -> subprocess.Popen[bytes] | ForkedProcess:
    if hardware.has_gpu():
        return start(arguments, env, output, errors)
    return Forks.of(env).start(arguments, env, output, errors)


def run_forked(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Output and return code of `outrider`, forked where possible."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        code = start_forked(arguments, environment(**env), output, errors).wait()
        return subprocess.CompletedProcess([*arguments], code, output.read_text(), errors.read_text())


class EngineWatch(threading.Thread):
    """`seen` becomes true if an engine runs below this process."""

    EVERY_SECONDS = 0.5

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen = False
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(self.EVERY_SECONDS):
            self.seen |= bool(engine_processes(os.getpid()))


def engine_processes(pid: int) -> dict[str, psutil.Process]:
    """SGLang's processes below this one, by their title after 'sglang::'."""
    processes = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(child.cmdline())
            if "sglang::" in title:
                processes[title.partition("::")[2].split()[0]] = child
    return processes


def environment(**changes: str) -> dict[str, str]:
    """Environment for a started command, without access to the hub."""
    return os.environ | {"HF_HUB_OFFLINE": "1"} | changes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
