"""POST /outrider/tune: the running server measures itself and goes on with the new profile.

The body is a `TuneRequest`. The answer is a line of JSON per event of the measurement, the last one its result.
"""

import asyncio
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from ...processes.engine import Engine
from ...settings.resolve import Resolved
from ...tune import measure
from ...tune.events import Event, Failed, Finished, to_line
from ...tune.request import TuneRequest
from .. import openapi
from ..errors import ApiError
from ..lifecycle import Lifecycle
from ..requests import receive
from ..requests.validation import Limits


def install(app: FastAPI, resolved: Resolved, engine: Engine, lifecycle: Lifecycle, limits: Limits) -> None:
    """Add the route; one measurement at a time, and only while the server is idle."""
    settings, busy = resolved.settings, asyncio.Lock()

    @app.post(
        "/outrider/tune",
        openapi_extra=openapi.request_body(TuneRequest),
        responses=openapi.responses(kind="application/x-ndjson", text="a line of JSON per event, the last the result"),
    )
    async def tune_server(raw: Request) -> StreamingResponse:
        request = await receive.receive_as(TuneRequest, raw, limits)
        if not settings.profiled:
            raise ApiError(
                "this server plans nothing by a profile; start it with a drafter", status=409, code="conflict"
            )
        if busy.locked() or lifecycle.in_flight > 1 or not lifecycle.accepting:
            raise ApiError("the server is busy; a measurement needs it idle", status=409, code="conflict")
        return StreamingResponse(_lines(busy, request, resolved, engine), media_type="application/x-ndjson")


async def _lines(busy: asyncio.Lock, request: TuneRequest, resolved: Resolved, engine: Engine) -> AsyncIterator[str]:
    events: asyncio.Queue[Event | None] = asyncio.Queue()

    async def work() -> None:
        try:
            tuned = await measure.tune(
                engine,
                resolved.to_measure(request.name),
                request.effort,
                how="outrider tune --server",
                progress=events.put_nowait,
            )
            events.put_nowait(Finished(tuned.table(), str(tuned.profile.folder)))
        except (OSError, ValueError, RuntimeError) as error:
            events.put_nowait(Failed(str(error)))
        finally:
            events.put_nowait(None)

    async with busy:
        task = asyncio.create_task(work())
        try:
            while (event := await events.get()) is not None:
                yield to_line(event)
        finally:
            task.cancel()
