"""SGLang's launcher with our targets, environment and signal handling for its processes."""

from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

from sglang.srt.entrypoints import engine

from ..machine import threads
from .process import signals_blocked


class Launcher(engine.Engine):
    """Starts processes that leave signals to us.

    environment: further variables of the scheduler's process. detokenizes: this process detokenizes, see
    `detokenizer.py`. controller: target of the process that starts the schedulers of several engines. schedulers: the
    started processes, or their controller.
    """

    environment: ClassVar[Mapping[str, str]] = {}
    detokenizes: ClassVar[bool] = False
    controller: ClassVar[Callable[..., None]] = engine.run_data_parallel_controller_process
    schedulers: ClassVar[Sequence[BaseProcess]] = ()

    @classmethod
    def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.detokenizes:
            port_args.detokenizer_ipc_name = port_args.tokenizer_ipc_name
        controller = engine.run_data_parallel_controller_process
        try:
            engine.run_data_parallel_controller_process = cls.controller
            with signals_blocked(), threads.child_environment(cls.environment):
                result, Launcher.schedulers = super()._launch_scheduler_processes(
                    server_args, port_args, *args, **kwargs
                )
                return result, Launcher.schedulers
        finally:
            engine.run_data_parallel_controller_process = controller

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.detokenizes:
            return [], []
        with signals_blocked():
            return super()._launch_detokenizer_subprocesses(*args, **kwargs)
