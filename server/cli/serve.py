"""Start a server that answers OpenAI-compatible requests.

Without --model it serves the embedded SmolLM2-135M-Instruct. SGLang's own flags go after --, as they are:
  outrider serve --model ./Qwen3-4B -- --tp-size 2
"""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from ..log_names import SERVER
from ..settings.flags import MOVED as MOVED
from ..settings.flags import add_all_flags, served_settings_of
from ..settings.settings import Settings

_say = logging.getLogger(SERVER).info

if TYPE_CHECKING:
    from ..http.listen import Listeners
    from ..processes.engine import Engine
    from ..settings.resolve import Resolved
    from ..tune.idle import Traffic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_all_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the return value is the exit code."""
    settings = served_settings_of(args)
    signal.signal(signal.SIGTERM, _on_early_sigterm)

    from ..http import listen
    from ..machine import hardware
    from ..processes import engine as engines
    from ..processes import logs
    from ..settings.resolve import resolve

    logs.configure(settings)
    # Bind now: a port in use is reported before the model loads, and no other program takes it meanwhile.
    listeners = listen.Listeners.open(settings)
    if listeners.tls is not None:
        listeners.tls.warn()
    resolved = resolve(settings, _say)
    on_cpu = resolved.settings.resolved_device == "cpu"
    if on_cpu:
        hardware.instruction_set()  # compiles the kernels, which else the first request would wait for
    parallel = settings.parallel
    if parallel.nnodes > 1:
        _say(f"Node {parallel.node_rank} of {parallel.nnodes}; the nodes meet at {parallel.dist_init_addr}")
    if not parallel.leads:
        return _compute_for_another(resolved, listeners)
    engine = engines.start(resolved, settings.resolved_engines)

    async def before_first() -> None:
        from ..tune.measure import measure_first

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
    """Run a further node of an engine; the first node takes the requests."""
    from ..processes import engine as engines

    parallel, grace = resolved.settings.parallel, 0.0
    processes = engines.join(resolved)
    try:
        # Imported now: it reads the environment that the ranks were started with.
        from ..http import worker_node

        _say(f"Ready: node {parallel.node_rank} of {parallel.nnodes}; requests go to node 0")
        exit_code = worker_node.serve(resolved, processes, listeners)
        if exit_code == 0 and processes.dead_processes():  # node 0 ends the processes of all ranks
            grace = engines.EXIT_SECONDS
        return exit_code
    finally:
        processes.stop(grace)


async def _refine(engine: Engine, resolved: Resolved, traffic: Traffic) -> None:
    """Turn a quick profile into a thorough one while the server is idle."""
    from outrider.profiles import store

    from ..tune import measure
    from ..tune.effort import IDLE
    from ..tune.idle import Idle

    try:
        quick = store.read(Path(str(resolved.settings.profile)))
        if quick.thorough:
            return
        cores = resolved.settings.schedulers * resolved.settings.resolved_threads
        idle = Idle(traffic, cores=max(1, cores))
        _say(
            f"Profile {quick.name} is a quick one: it is refined while no request is served, about two minutes "
            "of work in all, on one core on average (--no-tune stops that)"
        )
        tuned = await measure.tune(engine, resolved, IDLE, how="in idle time", refined=quick, run=idle.run)
    except Exception as error:  # the server goes on with the quick profile
        _say(f"The profile is not refined: {str(error) or repr(error)}")
    else:
        _say(f"Profile {tuned.profile.name} is refined, and measuring ends: {tuned.summary}")


def _announce(settings: Settings, engine: Engine) -> None:
    from ..http.requests.sampling_defaults import SamplingDefaults

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
        '"messages": [{"role": "user", "content": "Explain what rain is."}]}\'\n'
    )


def _on_early_sigterm(signum: int, frame: object) -> None:
    # No request runs while the model loads, so there is nothing to drain.
    raise SystemExit(0)
