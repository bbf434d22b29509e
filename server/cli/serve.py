"""Start a server that answers OpenAI-compatible requests.

Without --model it serves the embedded SmolLM2-135M-Instruct. SGLang's own flags go after --, as they are:
  outrider serve --model ./Qwen3-4B -- --tp-size 2
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ..log_names import SERVER
from ..settings import traces
from ..settings.flags import add_drafter_flags, add_target_flags, add_unmasking_flags
from ..settings.settings import LOG_FORMATS, LOG_LEVELS, LOGGED_REQUESTS, PLANNERS, SAMPLING_DEFAULTS, Settings

_say = logging.getLogger(SERVER).info

if TYPE_CHECKING:
    from ..http.listen import Listeners
    from ..processes.engine import Engine
    from ..settings.resolve import Resolved
    from ..tune.idle import Traffic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    model = parser.add_argument_group("model")
    add_target_flags(model)
    model.add_argument("--served-model-name", metavar="NAME", help="the name requests use (default: the model's)")
    model.add_argument("--context-length", type=int, metavar="N", help="tokens of prompt and answer together")
    model.add_argument("--chat-template", metavar="FILE", help="a template in place of the model's own")
    model.add_argument(
        "--sampling-defaults",
        choices=SAMPLING_DEFAULTS,
        default=defaults.sampling_defaults,
        help="for what a request does not name: the model's recommendation, or OpenAI's 1 and 1 (default: %(default)s)",
    )
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
        help="without a profile that fits, measure a quick one at start and refine it in idle time (default: yes)",
    )

    add_unmasking_flags(parser.add_argument_group("block-diffusion models"))

    capacity = parser.add_argument_group("capacity")
    capacity.add_argument(
        "--engines",
        type=int,
        metavar="N",
        help="that share the machine's cores, or GPUs, behind one address (default: one per NUMA node of a CPU)",
    )
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
    http.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="keys with limits of their own, made by `outrider key`; read again when the file changes",
    )
    http.add_argument(
        "--usage-file",
        type=Path,
        metavar="FILE",
        help="keeps what keys have used of their tokens_per_day over a restart (default: in the cache folder, by port)",
    )
    http.add_argument(
        "--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM); renewed ones are taken up"
    )
    http.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help="its private key (default: in the same file); OUTRIDER_SSL_KEYFILE_PASSWORD opens an encrypted one",
    )
    http.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="only clients with a certificate signed by one of these are served"
    )
    http.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="serve /metrics there, without key and TLS, and not on --port",
    )
    http.add_argument(
        "--metrics-host",
        default=defaults.metrics_host,
        metavar="HOST",
        help="of --metrics-port (default: %(default)s, this machine only)",
    )
    http.add_argument(
        "--allowed-hosts",
        type=_names,
        default=defaults.allowed_hosts,
        metavar="NAME,…",
        help="answer requests to these host names, beside this machine's; *: to any (default: any, but without a key on"
        " this machine only its own)",
    )
    http.add_argument("--max-choices", type=int, default=defaults.max_choices, metavar="N", help="largest n")
    http.add_argument(
        "--max-body-bytes", type=int, default=defaults.max_body_bytes, metavar="N", help="largest request body"
    )
    http.add_argument(
        "--max-request-tokens",
        type=int,
        metavar="N",
        help="of a request's prompts and answers together (default: as many as the context allows)",
    )
    http.add_argument(
        "--max-queued-requests",
        type=int,
        metavar="N",
        help="refuse more with 429 while N wait, each choice one (default: never)",
    )
    http.add_argument(
        "--max-queue-seconds",
        type=float,
        metavar="S",
        help="give a request up that waits longer (default: never)",
    )
    http.add_argument(
        "--max-request-seconds",
        type=float,
        metavar="S",
        help="end a request with an error that runs longer, its waiting not counted (default: never)",
    )
    http.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="open at a time; one more is answered 503 and closed (default: 4096, or fewer by the limit on open files)",
    )
    http.add_argument(
        "--max-receive-seconds",
        type=float,
        default=defaults.max_receive_seconds,
        metavar="S",
        help="close a connection whose request, headers and body, or TLS handshake has not come whole after so long"
        " (default: %(default)g)",
    )
    http.add_argument(
        "--max-stall-seconds",
        type=float,
        default=defaults.max_stall_seconds,
        metavar="S",
        help="end a connection whose client takes nothing of its answer for so long (default: %(default)g)",
    )
    http.add_argument(
        "--max-step-seconds",
        type=float,
        default=defaults.max_step_seconds,
        metavar="S",
        help="/health says 503 when requests are under way and no step has ended for so long; more than a chunk of a"
        " prompt takes (default: %(default)g)",
    )
    http.add_argument(
        "--drain-seconds",
        type=float,
        default=defaults.drain_seconds,
        metavar="S",
        help="how long requests may go on after SIGTERM (default: %(default)g)",
    )
    http.add_argument(
        "--lame-duck-seconds",
        type=float,
        default=defaults.lame_duck_seconds,
        metavar="S",
        help="take new requests for so long after SIGTERM, while /ready says 503 already: for balancers that try"
        " nothing again (default: %(default)g)",
    )

    observing = parser.add_argument_group("observing")
    observing.add_argument("--log-level", choices=LOG_LEVELS, default=defaults.log_level, help="(default: %(default)s)")
    observing.add_argument(
        "--log-format", choices=LOG_FORMATS, default=defaults.log_format, help="json: one object per line"
    )
    observing.add_argument(
        "--log-requests",
        choices=LOGGED_REQUESTS,
        default=defaults.log_requests,
        help="a line when a request has ended; content: with its prompt and answer (default: %(default)s)",
    )
    observing.add_argument(
        "--otlp-endpoint",
        metavar="ADDRESS",
        default=next(filter(None, map(os.environ.get, traces.ENVIRONMENT)), None),
        help="send OpenTelemetry traces there: HOST:4317 for gRPC, HOST:4318 for HTTP",
    )
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG_FLAG", help="flags for SGLang, after --")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings from the flags; raises UserError where one cannot be."""
    values = {field.name: getattr(args, field.name) for field in fields(Settings) if hasattr(args, field.name)}
    return Settings(**values | {"sglang_flags": tuple(args.sglang_flags)})


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the return value is the exit code."""
    settings = settings_of(args)
    signal.signal(signal.SIGTERM, _on_early_sigterm)

    from ..http import listen
    from ..machine import hardware
    from ..processes import engine as engines
    from ..processes import logs
    from ..settings.resolve import resolve

    logs.configure(settings)
    # Bound now and used later: a port in use is told before the model is loaded, and nobody takes it meanwhile.
    listeners = listen.Listeners.open(settings)
    if listeners.tls is not None:
        listeners.tls.warn()
    resolved = resolve(settings, _say)
    on_cpu = resolved.settings.resolved_device == "cpu"
    if on_cpu:
        hardware.instruction_set()  # ready before the engine needs them, which would otherwise be in its first request
    parallel = settings.parallel
    if parallel.nnodes > 1:
        _say(f"Node {parallel.node_rank} of {parallel.nnodes}; the nodes meet at {parallel.dist_init_addr}")
    if not parallel.leads:
        return _compute_for_another(resolved, listeners)
    engine = engines.start(resolved, settings.resolved_engines)

    async def before_first() -> None:
        from ..tune.first import measure_first

        await measure_first(engine, resolved, _say)
        _announce(resolved.settings, engine)

    async def beside(traffic: Traffic) -> None:
        if settings.tune and settings.profile is None and resolved.settings.profile is not None:
            await _refine(engine, resolved, traffic)

    grace = 0.0
    try:
        exit_code = listen.serve(resolved, engine, listeners, before_first, beside)
        if exit_code == 0 and (parallel.nnodes > 1 or not on_cpu):
            grace = engines.EXIT_SECONDS
        return exit_code
    finally:
        engine.stop(grace)


def _compute_for_another(resolved: Resolved, listeners: Listeners) -> int:
    """Be a node of an engine whose first node takes the requests."""
    from ..processes import engine as engines

    parallel, grace = resolved.settings.parallel, 0.0
    processes = engines.join(resolved)
    try:
        # Imported now: it reads the environment that the ranks were started with.
        from ..http import worker_node

        _say(f"Ready: node {parallel.node_rank} of {parallel.nnodes}; requests go to node 0")
        exit_code = worker_node.serve(resolved, processes, listeners)
        if exit_code == 0 and processes.dead_processes():  # node 0 ends those of all ranks
            grace = engines.EXIT_SECONDS
        return exit_code
    finally:
        processes.stop(grace)


async def _refine(engine: Engine, resolved: Resolved, traffic: Traffic) -> None:
    """Make a quick profile a thorough one while nobody is served."""
    from outrider.profiles import store

    from ..tune import measure
    from ..tune.effort import IDLE
    from ..tune.idle import Idle

    try:
        quick = store.read(Path(str(resolved.settings.profile)))
        if quick.thorough:
            return
        cores = resolved.settings.schedulers * resolved.settings.resolved_threads
        idle = Idle(traffic, cores=max(1, cores), processes=[own.pid for own in engine.processes.values() if own.pid])
        _say(
            f"Profile {quick.name} is a quick one: it is refined while nobody is served, little more than two minutes "
            "of work in all, on one core on average (--no-tune stops that)"
        )
        tuned = await measure.tune(engine, resolved, IDLE, how="in idle time", refined=quick, run=idle.run)
    except Exception as error:  # whatever it is, the server goes on with what it has
        _say(f"The profile is not refined: {str(error) or repr(error)}")
    else:
        _say(f"Profile {tuned.profile.name} is refined, and nothing more is measured: {tuned.summary}")


def _announce(settings: Settings, engine: Engine) -> None:
    from ..http.sampling_defaults import SamplingDefaults

    manager = engine.tokenizer_manager
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    if settings.host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    url = f"{'https' if settings.ssl_certfile else 'http'}://{host}:{settings.port}"
    asks = settings.api_key is not None or settings.api_keys is not None
    key = "  -H 'Authorization: Bearer '\"$OUTRIDER_API_KEY\" \\\n" if asks else ""
    if not asks and settings.host not in ("127.0.0.1", "::1", "localhost"):
        _say(f"Whoever reaches {settings.host}:{settings.port} may use this server; --api-keys FILE asks for a key")
    several = f"{settings.resolved_engines} engines, each with " if settings.resolved_engines > 1 else ""
    capacity = f"{several}context {engine.context_length} tokens, KV cache {engine.max_total_tokens}"
    speculation = "speculation off" if settings.drafter == "off" else f"{settings.drafter} drafts of {settings.gamma}"
    if settings.diffusion:
        speculation = f"blocks of {settings.diffusion.block_size}, unmasking by {settings.unmasking}"
    SamplingDefaults.of(manager).announce(_say)
    _say(
        f"Ready: {url}  ({capacity}, {speculation})\n\n"
        f"Try it:\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n{key}"
        f'  -d \'{{"model": "{manager.served_model_name}", "max_tokens": 64, "temperature": 0, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}\'\n'
    )


def _on_early_sigterm(signum: int, frame: object) -> None:
    # Nothing is under way while the model loads, so nothing needs to be drained.
    raise SystemExit(0)
