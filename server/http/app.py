"""Build the HTTP app: routes, guards, and errors in one format."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.routing import Route

from ..processes.engine import Engine
from ..processes.engine_processes import EngineProcesses
from ..processes.run_folder import GRAMMARS
from ..settings.resolve import Resolved
from ..settings.settings import Settings
from . import errors, openapi
from .adapters import Adapters
from .answers import logprobs
from .answers.answer_log import AnswerLogger
from .answers.messages import MessageErrors
from .connections.hosts import AllowedHosts, HostGuard
from .keys import metering
from .keys.access import Access
from .keys.auth import AuthMiddleware
from .keys.queue_limit import QueueLimit
from .learning import Learning
from .lifecycle import Lifecycle
from .metrics import HttpMetrics, KeyMetrics
from .owner_learning import OwnerLearning
from .request_middleware import RequestMiddleware, name_requests_in_logs
from .requests import images, tokenization
from .requests.grammar_process import GrammarProcess
from .requests.messages import COUNT, MESSAGES
from .requests.responses import RESPONSES
from .requests.sampling_defaults import SamplingDefaults
from .requests.tokenization import PromptLength
from .requests.validation import Limits
from .routes import adapters, health, live, openai, page, tokenize, translated, tune

DIALECTS = (tokenize.TOKENIZE, tokenize.DETOKENIZE, MESSAGES, COUNT, RESPONSES)
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build(
    resolved: Resolved,
    engine: Engine,
    lifecycle: Lifecycle,
    access: Access,
    hosts: AllowedHosts,
    lifespan: Lifespan,
    learning: Learning | None,
    loaded: Adapters,
) -> RequestMiddleware:
    """Build the app for requests. lifespan: entered before the first request and left after the last."""
    settings, manager = resolved.settings, engine.tokenizer_manager
    limits = Limits(
        max_body_bytes=settings.max_body_bytes,
        model=manager.served_model_name,
        vocab_size=manager.model_config.vocab_size,
        context_length=engine.context_length,
        max_choices=settings.max_choices,
        has_tool_parser=bool(manager.config_value("tool_call_parser")),
        diffusion=settings.diffusion is not None,
        prompt_length=PromptLength(manager.tokenizer, engine.context_length),
        learns=settings.learn,
        looks_across=settings.looks_across,
        adapters=loaded.names,
        role=settings.parallel.role,
        images=images.install(manager, engine.context_length) if not settings.parallel.role else None,
        drafter_of=learning.drafter_of if isinstance(learning, OwnerLearning) else None,
    )
    sampling = SamplingDefaults.of(manager)
    tokenization.install(manager)
    logprobs.install(manager)
    app = bare(lifespan)
    app.state.compiler = GrammarProcess(engine.run_folder.path / GRAMMARS)
    room = min(engine.context_length, engine.max_total_tokens)
    table = metering.meter(manager, room, settings.max_request_tokens)
    queue = QueueLimit(manager, table, settings.max_queued_requests)
    chat, complete = openai.install(
        app, engine, lifecycle, limits, sampling, queue, app.state.compiler, settings.activations
    )
    tokenize.install(app, limits, chat)
    translated.install(app, limits, chat, complete)
    adapters.install(app, limits, loaded)
    health.install(app, engine, lifecycle)
    if settings.metrics_port is None:
        health.install_metrics(app)
    answers = AnswerLogger(manager.request_logger, manager.tokenizer, content=settings.log_requests == "content")
    manager.request_logger = answers
    page.install(app)
    live.install(app, settings, engine, lifecycle, answers, learning)
    tune.install(app, resolved, engine, lifecycle, limits)
    openapi.install(app, limits, sampling, DIALECTS, has_key=not access.open)
    app.add_middleware(AuthMiddleware, access=access, lifecycle=lifecycle, usage=KeyMetrics())
    return guarded(app, settings, limits.model, hosts)


def bare(lifespan: Lifespan | None = None) -> FastAPI:
    """Return an app without routes. It never redirects: FastAPI would send /docs/ to /docs at the address in `Host`."""
    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False, responses=openapi.ERROR)
    errors.install(app)
    return app


def guarded(app: FastAPI, settings: Settings, model: str, hosts: AllowedHosts) -> RequestMiddleware:
    """Wrap the app in middleware: allowed hosts, Anthropic's format of errors, ids, metrics and log lines."""
    app.add_middleware(HostGuard, hosts=hosts)
    app.add_middleware(MessageErrors)
    name_requests_in_logs()
    about = {
        "version": version("outrider"),
        "model": model,
        "device": settings.resolved_device,
        "drafter": settings.drafter,
        "planner": settings.planner,
        "engines": str(settings.resolved_engines),
    }
    paths = {route.path for route in app.routes if isinstance(route, Route)} - {openai.ELSEWHERE}
    return RequestMiddleware(
        app, HttpMetrics(about, paths, settings.plugin_config.max_pause), log=settings.log_requests != "none"
    )


def build_for_metrics(engine: EngineProcesses, lifecycle: Lifecycle, hosts: AllowedHosts) -> FastAPI:
    """Build the app of the separate metrics port: metrics and probes, without keys."""
    app = bare()
    health.install(app, engine, lifecycle)
    health.install_metrics(app)
    app.add_middleware(HostGuard, hosts=hosts)
    return app
