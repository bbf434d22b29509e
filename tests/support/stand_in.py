"""Makes SGLang launch a prestarted scheduler process with a stand-in that loads no model. Prints one line of JSON."""

import json
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def scheduler(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, pp_rank: int, dp_rank: int | None, writer: Connection
) -> None:
    """Reports ready, as a scheduler does after loading."""
    told = {"model": server_args.served_model_name, "ranks": (gpu_id, tp_rank, pp_rank, dp_rank)}
    has_ports = port_args.scheduler_input_ipc_name.startswith("ipc://")
    writer.send(
        {"status": "ready", "pid": os.getpid(), "told": told, "ports": has_ports, "environment": os.environ["TOLD"]}
    )


def main(run_dir: Path) -> dict[str, Any]:
    from outrider.server.model import target
    from outrider.server.processes import engine, sglang_args
    from outrider.server.processes.prefork import WaitingScheduler
    from outrider.server.processes.process import StartupReport
    from outrider.server.settings.memory import MemoryPlan
    from outrider.server.settings.settings import Settings

    settings = Settings(device="cpu")
    engine._set_environment(settings, run_dir)
    waiting = WaitingScheduler(StartupReport(run_dir / "failure"), verbose=True)
    os.environ["TOLD"] = "after it was started"
    engine.load_plugin()

    import sglang.srt.entrypoints.engine
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs

    from outrider.server.processes.launcher import Launcher

    arguments = sglang_args.build(settings, target.find(None), MemoryPlan(max_total_tokens=1024), engines=1)
    arguments.resolve_once()
    publish(arguments, role="tokenizer")
    multiprocessing = sglang.srt.entrypoints.engine.mp
    Launcher.waiting = waiting
    launched, (process,) = Launcher._launch_scheduler_processes(arguments, PortArgs.init_new(arguments), scheduler)
    launched.wait_for_ready()
    (info,) = launched.scheduler_infos
    process.join(60)
    return info | {
        "same_process": info["pid"] == process.pid != os.getpid(),
        "exit_code": process.exitcode,
        "module_is_back": sglang.srt.entrypoints.engine.mp is multiprocessing,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        json.dump(main(Path(folder)), sys.stdout)
