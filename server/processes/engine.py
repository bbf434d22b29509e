"""SGLang's engine, started, watched and stopped."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UserError
from ..machine import threads, topology
from ..machine.threads import Placement
from ..plugin.grammars import folder
from ..settings import traces
from ..settings.resolve import Resolved
from ..settings.settings import Settings
from . import data_parallel, logs
from .engine_processes import EngineProcesses, kill_children
from .process import StartupReport, quick_imports, run_detokenizer, run_scheduler
from .run_folder import GRAMMARS, RunFolder

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.parser.template_manager import TemplateManager
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Grace for a scheduler on a GPU to free its memory there before it is killed.
EXIT_SECONDS = 10.0


P = TypeVar("P", bound=EngineProcesses)


class EngineDied(Exception):
    """A process of the engine failed."""


@dataclass(frozen=True, slots=True)
class Engine(EngineProcesses):
    """A running engine, or several: SGLang's tokenizer manager in this process, each scheduler in its own.

    On a CPU this process also detokenizes; on a GPU another process does. max_total_tokens: of each engine.
    """

    tokenizer_manager: TokenizerManager
    template_manager: TemplateManager
    max_total_tokens: int
    context_length: int

    def begin(self) -> None:
        """Start to receive answers on the running event loop. SGLang installs signal handlers here."""
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        self.tokenizer_manager.auto_create_handle_loop()
        self.tokenizer_manager.server_status = ServerStatus.Up

    def fail_requests(self, message: str) -> None:
        """End every running request with an error, as the scheduler would.

        The status is not 503: proxies would then send a request that killed this engine to the next server.
        """
        from sglang.srt.managers.io_struct import AbortReq

        reason = {"type": "abort", "status_code": HTTPStatus.INTERNAL_SERVER_ERROR, "message": message}
        for request_id in list(self.tokenizer_manager.rid_to_state):
            self.tokenizer_manager._handle_abort_req(AbortReq(rid=request_id, finished_reason=reason))

    def abort_requests(self) -> None:
        """Tell the scheduler to abort all requests."""
        self.tokenizer_manager.abort_request(abort_all=True)

    def ask_to_exit(self) -> None:
        """Ask the scheduler to free its memory and exit. Call it in the event loop that talks to it."""
        from sglang.srt.managers.io_struct import ShutdownReq

        self.tokenizer_manager._dispatch_to_scheduler(ShutdownReq())


def start(resolved: Resolved, engines: int = 1) -> Engine:
    """Load the model and start the processes; returns when requests can be sent.

    engines: number of engines; they share this process and the detokenizer. Raises UserError with the reason in one
    line if one cannot start.
    """
    return _start(resolved, engines, _launch)


def join(resolved: Resolved) -> EngineProcesses:
    """Start this machine's part of an engine led by another machine; returns when all parts run."""
    return _start(resolved, 1, _launch_ranks)


def _start(resolved: Resolved, engines: int, launch: Callable[[Resolved, _LaunchInputs], P]) -> P:
    settings = resolved.settings
    run_folder = RunFolder.make()
    try:
        _set_environment(settings, run_folder.path)
        _silence_sglang(settings)
        report = StartupReport(run_folder.path / "failure")
        # On a GPU, or with SGLang's own flags, there may be several schedulers, which SGLang places better.
        alone = settings.resolved_device == "cpu" and not settings.sglang_flags
        placements, environment = [Placement()] * engines, dict[str, str]()
        if settings.resolved_device == "cpu":
            parts = topology.here().split(settings.schedulers)[: engines * settings.parallel.ranks_here]
            placements = [threads.place(settings.resolved_threads, part, bind=alone) for part in parts]
            environment = {**placements[0].environment} if engines == 1 else {}
            if engines > 1 or settings.parallel.tp_size > 1:
                environment |= data_parallel.environment(parts)
        with quick_imports():
            load_plugin()
            importlib.import_module("sglang.srt.entrypoints.engine")
        return launch(resolved, _LaunchInputs(run_folder, report, placements, environment, engines))
    except BaseException:
        kill_children()
        run_folder.remove()
        raise


@dataclass(frozen=True, slots=True)
class _LaunchInputs:
    """State before SGLang starts its processes. environment: see `launcher.Launcher`."""

    run_folder: RunFolder
    report: StartupReport
    placements: Sequence[Placement]
    environment: dict[str, str]
    engines: int


def _launch(resolved: Resolved, inputs: _LaunchInputs) -> Engine:
    arguments, launched = _launch_processes(resolved, inputs)
    manager, templates, _, scheduler, watchdog, *_ = launched
    if resolved.settings.otlp_endpoint is not None:
        traces.begin(arguments)
    inputs.run_folder.attach(Path(manager.load_snapshot_reader.path))
    # EngineProcesses.wait_for_death notices a death at once; SGLang's watchdog polls every second.
    watchdog.stop()
    return Engine(
        processes=dict(zip(watchdog._names, watchdog._processes, strict=True)),
        run_folder=inputs.run_folder,
        report=inputs.report,
        tokenizer_manager=manager,
        template_manager=templates,
        max_total_tokens=int(scheduler.scheduler_infos[0]["max_total_num_tokens"]),
        context_length=int(manager.context_len),
    )


def _launch_ranks(resolved: Resolved, inputs: _LaunchInputs) -> EngineProcesses:
    from .launcher import Launcher

    _launch_processes(resolved, inputs)
    inputs.report.started()
    processes = {f"scheduler_{i}": process for i, process in enumerate(Launcher.schedulers)}
    return EngineProcesses(processes=processes, run_folder=inputs.run_folder, report=inputs.report)


def _launch_processes(resolved: Resolved, inputs: _LaunchInputs) -> tuple[ServerArgs, tuple[Any, ...]]:
    """Run SGLang's launcher; returns its settings and its results. Raises UserError with the reason in one line."""
    from sglang.srt.entrypoints.engine import init_tokenizer_manager

    from . import sglang_args
    from .detokenizer import DetokenizingManager
    from .launcher import Launcher

    settings, report = resolved.settings, inputs.report
    verbose = settings.log_level == "debug"
    ours = (report, inputs.placements, os.getpid(), verbose)
    Launcher.environment = inputs.environment
    Launcher.controller = functools.partial(data_parallel.run_controller, *ours)
    arguments = sglang_args.build(settings, resolved.model, resolved.memory, inputs.engines)
    arguments.custom_sigquit_handler = _on_sigquit
    Launcher.detokenizes = settings.resolved_device == "cpu" and arguments.detokenizer_worker_num == 1
    manager_class = DetokenizingManager if Launcher.detokenizes else None
    tempfile.tempdir = str(inputs.run_folder.path)  # where SGLang puts the sockets between its processes
    try:
        return arguments, Launcher._launch_subprocesses(
            arguments,
            functools.partial(init_tokenizer_manager, TokenizerManagerClass=manager_class),
            functools.partial(run_scheduler, *ours),
            functools.partial(run_detokenizer, report, os.getpid(), verbose),
        )
    except Exception as error:
        if verbose:
            logger.exception("the engine could not start")
        reason = report.read() or f"{type(error).__name__}: {sglang_args.first_line(error)}"
        hint = "" if verbose else " (--log-level debug shows more)"
        raise UserError(f"the engine could not start: {reason}{hint}") from None
    finally:
        tempfile.tempdir = None
        logs.configure(settings)  # SGLang has set the level of all loggers to its own


def _set_environment(settings: Settings, run_dir: Path) -> None:
    settings.plugin_config.to_env()
    # Our entry points' name: SGLang then loads no other plugin of this machine.
    os.environ.setdefault("SGLANG_PLUGINS", "outrider")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if settings.parallel.nnodes == 1:
        # torch's rendezvous would otherwise be a TCP server without a password, open on every network interface.
        os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{run_dir}/rendezvous")
    # torch's collectives listen too, by default on the address of this machine's name.
    interface = "lo" if settings.parallel.nnodes == 1 else settings.parallel.interface()
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if settings.parallel.role and settings.host not in ("0.0.0.0", "::"):
        os.environ.setdefault("SGLANG_HOST_IP", settings.host)  # where the other server finds this one
    if not settings.parallel.leads:
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # SGLang would watch them itself, and never return
    metrics = run_dir / "metrics"
    metrics.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    (run_dir / GRAMMARS).mkdir()
    os.environ[folder.ENV] = str(run_dir / GRAMMARS)
    logs.configure_processes(settings, run_dir)
    for name, seconds in (("WAITING", settings.max_queue_seconds), ("RUNNING", settings.max_request_seconds)):
        if seconds is not None:
            os.environ[f"SGLANG_REQ_{name}_TIMEOUT"] = str(seconds)
    if settings.resolved_device == "cpu":
        # So that no library looks for a GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def load_plugin() -> None:
    """Load our plugin, or raise: SGLang would log a failing plugin and go on without it."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from ..plugin.must_take import NotApplied
    from .sglang_args import ALGORITHM

    failures: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            failures.append(repr(record.exc_info[1]))
        return not record.exc_info

    plugins_logger = logging.getLogger("sglang.srt.plugins")
    plugins_logger.addFilter(note)
    try:
        load_plugins()
    except NotApplied as error:
        raise UserError(str(error)) from error
    finally:
        plugins_logger.removeFilter(note)
    try:
        SpeculativeAlgorithm.from_string(ALGORITHM)
    except (KeyError, ValueError):
        failures.append("its entry points are missing, or SGLANG_PLUGINS or SGLANG_PLATFORM exclude it")
    if failures:
        raise UserError(f"SGLang could not load Outrider's plugin: {failures[0]}; reinstall Outrider")


def _silence_sglang(settings: Settings) -> None:
    """Set SGLang's log level, see `logs.sglang_level`."""
    logs.configure(settings)
    if settings.log_level not in ("debug", "info"):
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes that are started
    logging.getLogger("sglang.srt.entrypoints.engine").addFilter(
        lambda record: not record.getMessage().startswith("Using custom SIGQUIT handler")
    )


def _on_sigquit(signum: int, frame: object) -> None:
    # Sent by a process that failed during the start. Raised in the main thread, which waits for that process.
    raise EngineDied("a process of the engine failed")
