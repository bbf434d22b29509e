"""Start a server that answers OpenAI-compatible requests.

Without --model it serves the embedded SmolLM2-135M-Instruct. SGLang's own flags go after --, as they are:
  outrider serve --model ./Qwen3-4B -- --tp-size 2
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from outrider.server.engine.flags import add_drafter_flags, add_target_flags
from outrider.server.engine.settings import LOG_LEVELS, PLANNERS, Settings
from outrider.server.errors import UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from outrider.server.engine.engine import Engine
    from outrider.server.engine.resolve import Resolved
    from outrider.server.http.lifecycle import Lifecycle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    model = parser.add_argument_group("model")
    add_target_flags(model)
    model.add_argument("--served-model-name", metavar="NAME", help="the name requests use (default: the model's)")
    model.add_argument("--context-length", type=int, metavar="N", help="tokens of prompt and answer together")
    model.add_argument("--chat-template", metavar="FILE", help="a template in place of the model's own")
    model.add_argument("--tool-call-parser", metavar="NAME", help="SGLang's parser for tool calls, or auto")
    model.add_argument("--reasoning-parser", metavar="NAME", help="SGLang's parser for reasoning, or auto")

    speculation = parser.add_argument_group("speculation")
    add_drafter_flags(speculation)
    speculation.add_argument(
        "--planner",
        choices=PLANNERS,
        default=defaults.planner,
        help="decides how much of each draft is verified (default: %(default)s, by measured costs)",
    )
    speculation.add_argument(
        "--threshold", type=float, default=defaults.threshold, metavar="P", help="survival for --planner threshold"
    )
    speculation.add_argument(
        "--profile",
        metavar="NAME_OR_FOLDER",
        help="measured step costs and calibration, by `outrider tune` (default: the one that fits)",
    )
    speculation.add_argument(
        "--tune",
        action=argparse.BooleanOptionalAction,
        default=defaults.tune,
        help="without a profile that fits, measure a quick one at start (default: yes)",
    )

    capacity = parser.add_argument_group("capacity")
    capacity.add_argument("--max-running-requests", type=int, metavar="N", help="decoded at the same time")
    capacity.add_argument("--max-total-tokens", type=int, metavar="N", help="size of the KV cache in tokens")
    capacity.add_argument(
        "--chunked-prefill-size", type=int, metavar="N", help="prompt tokens per step; -1: all at once"
    )
    capacity.add_argument("--disable-radix-cache", action="store_true", help="share no prefixes between requests")

    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default=defaults.host, help="(default: %(default)s, this machine only)")
    http.add_argument("--port", type=int, default=defaults.port, help="(default: %(default)s)")
    http.add_argument(
        "--api-key",
        default=os.environ.get("OUTRIDER_API_KEY"),
        metavar="KEY",
        help="ask for it on every route but /health and /ready; OUTRIDER_API_KEY keeps it out of the process list",
    )
    http.add_argument("--max-choices", type=int, default=defaults.max_choices, metavar="N", help="largest n")
    http.add_argument(
        "--max-body-bytes", type=int, default=defaults.max_body_bytes, metavar="N", help="largest request body"
    )
    http.add_argument(
        "--drain-seconds",
        type=float,
        default=defaults.drain_seconds,
        metavar="S",
        help="how long requests may go on after SIGTERM (default: %(default)g)",
    )
    http.add_argument("--log-level", choices=LOG_LEVELS, default=defaults.log_level, help="(default: %(default)s)")
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG_FLAG", help="flags for SGLang, after --")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the return value is the exit code."""
    values = {field.name: getattr(args, field.name) for field in fields(Settings)}
    values["sglang_flags"] = tuple(args.sglang_flags)
    settings = Settings(**values)
    # Bound now and used later: a port in use is told before the model is loaded, and nobody takes it meanwhile.
    listener = bind(settings.host, settings.port)
    signal.signal(signal.SIGTERM, _on_early_sigterm)

    from outrider.server.cli import prepare
    from outrider.server.engine.resolve import resolve

    resolved = resolve(settings, _say)
    settings = resolved.settings
    if settings.resolved_device == "cpu":
        prepare.compile_kernels()
    from outrider.server.engine import engine as engines

    engine = engines.start(resolved)
    grace = 0.0
    try:
        exit_code = _serve(resolved, engine, listener)
        if exit_code == 0 and settings.resolved_device == "cuda":
            grace = engines.EXIT_SECONDS
        return exit_code
    finally:
        engine.stop(grace)


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address, not listening yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise UserError(f"--host {host} is not an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except PermissionError:
        raise UserError(f"port {port} needs more rights; choose one from 1024 on with --port") from None
    except OSError as error:
        if error.errno in (98, 48):  # EADDRINUSE on Linux, on BSD and macOS
            raise UserError(f"port {port} on {host} is in use; choose another with --port") from None
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.set_inheritable(False)
    return listener


def _serve(resolved: Resolved, engine: Engine, listener: socket.socket) -> int:
    import uvicorn

    from outrider.server.http import app
    from outrider.server.http.lifecycle import Lifecycle

    settings = resolved.settings
    lifecycle = Lifecycle(engine, settings.drain_seconds)
    failure: str | None = None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal failure
        try:
            await _begin(engine, lifecycle, resolved)
            _announce(settings, engine)
        except Exception as error:
            failure = engine.report.read() or str(error) or repr(error)
            server.should_exit = True
        yield
        lifecycle.end()

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # Signals are the lifecycle's: uvicorn would stop listening at once, and refuse connections while draining.
            yield

    server = Server(
        uvicorn.Config(
            app.build(resolved, engine, lifecycle, lifespan),
            log_level=settings.log_level,
            access_log=settings.log_level in ("debug", "info"),
            loop="uvloop",
            server_header=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=30,
        )
    )
    lifecycle.server = server
    server.run(sockets=[listener])
    if failure is not None:
        raise UserError(f"the engine was loaded but cannot answer: {failure}")
    return lifecycle.exit_code


async def _begin(engine: Engine, lifecycle: Lifecycle, resolved: Resolved) -> None:
    """Begin receiving from the engine, and have it answer once: what comes later is then known to work and warm."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    manager, settings = engine.tokenizer_manager, resolved.settings
    manager.auto_create_handle_loop()
    # After the line above, which installs SGLang's signal handlers, so that ours replace them.
    lifecycle.begin()
    manager.server_status = ServerStatus.Up
    parameters = {"temperature": 0.0, "max_new_tokens": 2 * settings.gamma}
    async for _ in manager.generate_request(GenerateReqInput(text="1 2 3 1 2 3 1 2", sampling_params=parameters)):
        pass
    engine.report.started()
    if resolved.unmeasured and settings.tune:
        await _tune(engine, resolved)
    lifecycle.up()


async def _tune(engine: Engine, resolved: Resolved) -> None:
    """Measure a quick profile; a server that cannot be measured still serves."""
    from outrider.server.tune import measure
    from outrider.server.tune.effort import QUICK

    _say("No profile fits this engine: measuring a quick one (once; `outrider tune` measures a thorough one)")
    try:
        tuned = await measure.tune(engine, resolved, QUICK)
    except (OSError, ValueError, RuntimeError) as error:
        _say(f"Not measured ({error}); every draft is verified")
    else:
        _say(f"Profile {tuned.profile.name}: {tuned.summary}")


def _announce(settings: Settings, engine: Engine) -> None:
    manager = engine.tokenizer_manager
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    if settings.host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"http://{host}:{settings.port}"
    key = "  -H 'Authorization: Bearer '\"$OUTRIDER_API_KEY\" \\\n" if settings.api_key else ""
    speculation = "speculation off" if settings.drafter == "off" else f"{settings.drafter} drafts of {settings.gamma}"
    _say(
        f"Ready: {url}  (context {engine.context_length} tokens, KV cache {engine.max_total_tokens}, {speculation})\n\n"
        f"Try it:\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n{key}"
        f'  -d \'{{"model": "{manager.served_model_name}", "max_tokens": 64, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}\'\n'
    )


def _on_early_sigterm(signum: int, frame: object) -> None:
    # Nothing is under way while the model loads, so nothing needs to be drained.
    raise SystemExit(0)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
