"""GET /outrider/live: the numbers that the page draws."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from ...plugin import worker_rpc
from ...processes.engine import Engine
from ...settings.settings import Settings
from ..answers.answer_log import AnswerLogger
from ..errors import ApiError
from ..learning import Learning
from ..lifecycle import Lifecycle

MIN_INTERVAL_SECONDS = 0.5
"""Shortest time between two reads of the engines, however many pages are open."""


def install(
    app: FastAPI,
    settings: Settings,
    engine: Engine,
    lifecycle: Lifecycle,
    answers: AnswerLogger,
    learning: Learning | None,
) -> None:
    live = Live(engine, lifecycle, answers)
    about = {
        "model": engine.tokenizer_manager.served_model_name,
        "drafter": settings.drafter,
        "planner": settings.planner,
        "context_length": engine.context_length,
    }

    @app.get("/outrider/live", responses={503: {"description": "it starts, stops or has failed"}})
    async def get_live() -> JSONResponse:
        learned = {} if learning is None else {"learning": learning.snapshot()}
        return JSONResponse(about | await live.read() | learned, headers={"Cache-Control": "no-store"})


class Live:
    """Reads the engines once for all open pages."""

    def __init__(self, engine: Engine, lifecycle: Lifecycle, answers: AnswerLogger) -> None:
        self._engine, self._lifecycle, self._answers = engine, lifecycle, answers
        self._read_at = 0.0
        self._answer: asyncio.Task[dict[str, Any]] | None = None

    async def read(self) -> dict[str, Any]:
        """Return sums over all engines (`plugin/decode/live.py`), their number, counts of answers that met and missed
        their service level, and `time`: seconds on this server's clock."""
        if not self._lifecycle.accepting:
            raise ApiError(f"the server is {self._lifecycle.status}", status=503, code="unavailable")
        now = time.monotonic()
        if self._answer is None or (self._answer.done() and now - self._read_at > MIN_INTERVAL_SECONDS):
            self._read_at, self._answer = now, asyncio.create_task(self._read())
        return await asyncio.shield(self._answer)  # more callers may wait for it

    async def _read(self) -> dict[str, Any]:
        try:
            states = await worker_rpc.read_live(self._engine.tokenizer_manager)
        except worker_rpc.EngineFailed as error:
            raise ApiError(str(error), status=503, code="unavailable") from None
        return merged(states) | {"levels": self._answers.levels, "time": time.monotonic(), "engines": len(states)}


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts summed, and the curve of the engine with the most requests."""
    busiest = max(states, key=lambda state: state["requests"]["running"])
    summed = [name for name in busiest if name not in ("curve", "exchange")]
    return {name: _sum([state[name] for state in states]) for name in summed} | {"curve": busiest["curve"]}


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _sum([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], list):
        return [sum(each) for each in zip(*values, strict=True)]
    return sum(values)
