"""POST /outrider/tune: the running server measures itself and goes on with the new profile.

The answer is a line of JSON per step of progress, and a last one with the result.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.profiles import store
from outrider.server.engine.engine import Engine
from outrider.server.engine.resolve import Resolved
from outrider.server.engine.settings import PROFILED_PLANNERS
from outrider.server.http import requests
from outrider.server.http.errors import ApiError
from outrider.server.http.lifecycle import Lifecycle
from outrider.server.tune import cli, measure


class TuneRequest(BaseModel):
    """As the arguments of `outrider tune`."""

    model_config = ConfigDict(extra="forbid")

    quick: bool = False
    max_requests: int | None = Field(None, ge=1)
    rounds: int | None = Field(None, ge=1)
    name: str | None = Field(None, pattern=f"^{store.NAME.pattern}$")


def install(app: FastAPI, resolved: Resolved, engine: Engine, lifecycle: Lifecycle) -> None:
    """Add the route; one measurement at a time, and only while nobody is served."""
    settings, busy = resolved.settings, asyncio.Lock()

    @app.post("/outrider/tune")
    async def tune_server(raw: Request) -> StreamingResponse:
        try:
            request = TuneRequest.model_validate_json(await requests.read_body(raw, settings.max_body_bytes))
        except ValidationError as error:
            first = error.errors()[0]
            raise ApiError(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from None
        if settings.drafter == "off" or settings.planner not in PROFILED_PLANNERS:
            raise ApiError(
                "this server plans nothing by a profile; start it with a drafter", status=409, code="conflict"
            )
        if busy.locked() or lifecycle.in_flight > 1 or not lifecycle.accepting:
            raise ApiError("the server is busy; a measurement needs it idle", status=409, code="conflict")
        return StreamingResponse(_lines(busy, request, resolved, engine), media_type="application/x-ndjson")


async def _lines(busy: asyncio.Lock, request: TuneRequest, resolved: Resolved, engine: Engine) -> AsyncIterator[str]:
    events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def work() -> None:
        try:
            tuned = await measure.tune(
                engine,
                resolved.to_measure(request.name),
                cli.effort(request.model_dump()),
                how="outrider tune --server",
                progress=lambda *progress: events.put_nowait({"progress": progress}),
            )
            events.put_nowait({"table": tuned.table(), "folder": str(tuned.profile.folder)})
        except (OSError, ValueError, RuntimeError) as error:
            events.put_nowait({"error": str(error)})
        finally:
            events.put_nowait(None)

    async with busy:
        task = asyncio.create_task(work())
        try:
            while (event := await events.get()) is not None:
                yield json.dumps(event) + "\n"
        finally:
            task.cancel()
