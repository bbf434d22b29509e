"""Run several engines for one HTTP process: SGLang's data parallelism, with our start and watch of processes.

SGLang's controller is a process between the tokenizer manager and the schedulers. It starts a scheduler per engine,
and sends a request to the engine with the fewest tokens, other messages to all. Each engine has its own part of the
machine's cores, a NUMA node if there are several. Its memory is on the same node, because the first thread that touches
a page decides its place.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ..machine import threads
from ..machine.threads import Placement
from ..machine.topology import Topology
from .process import StartupReport, die_with, engine_index, run_scheduler

BALANCE = "total_tokens"
"""SGLang's name of the policy that picks the engine with the fewest tokens, waiting requests included."""
RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
WATCHDOG_SECONDS = 1.0
"""Time between two signs of life to SGLang's watchdog while no messages come."""


def environment(parts: Sequence[Topology]) -> dict[str, str]:
    """Return the environment of schedulers on these parts of a CPU: engines, or ranks of one engine.

    Without it SGLang allows one scheduler per NUMA node.
    """
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part.cpus)) for part in parts)}


def run_controller(
    report: StartupReport, placements: Sequence[Placement], parent: int, verbose: bool, **kwargs: Any
) -> None:
    """Run the controller's process, in place of SGLang's target; kwargs are SGLang's."""
    die_with(parent)
    tempfile.tempdir = str(report.path.parent)  # where SGLang puts the sockets to the schedulers
    from sglang.srt.managers import data_parallel_controller as sglang

    # The controller calls no more of `multiprocessing`.
    sglang.mp = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=functools.partial(_Scheduler, placements))
    sglang.DataParallelController.event_loop = _dispatch
    kwargs["run_scheduler_process_func"] = functools.partial(run_scheduler, report, placements, os.getpid(), verbose)

    def give_up(failure: threading.ExceptHookArgs) -> None:
        report.write(f"{failure.exc_type.__name__}: {failure.exc_value}")
        os._exit(1)

    threading.excepthook = give_up  # SGLang starts each scheduler in a thread, and waits for it
    sglang.run_data_parallel_controller_process(**kwargs)


class _Scheduler(multiprocessing.Process):
    """An engine's scheduler, started with its placement's environment, and watched."""

    def __init__(self, placements: Sequence[Placement], target: Callable[..., None], args: tuple[Any, ...]) -> None:
        super().__init__(target=target, args=args)
        engine = engine_index(args)
        self._environment = {**placements[engine].environment, RENDEZVOUS: f"{os.environ[RENDEZVOUS]}-{engine}"}

    def start(self) -> None:
        """Start the process. SGLang starts one at a time."""
        with threads.child_environment(self._environment):
            super().start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End the controller if the scheduler fails: it would send requests to it, and wait, for ever."""
        self.join()
        if self.exitcode:
            os._exit(1)


def _dispatch(controller: Any) -> None:
    """Run SGLang's message loop, but sleep between messages: SGLang's own polls, which takes a core."""
    inbox = controller.recv_from_tokenizer
    from sglang.srt.managers.io_struct import sock_recv

    while True:
        if inbox.poll(WATCHDOG_SECONDS * 1000):
            controller._request_dispatcher(sock_recv(inbox))
        controller.soft_watchdog.feed()
