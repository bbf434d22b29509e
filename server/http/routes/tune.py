"""POST /outrider/tune: the running server measures itself and goes on with the new profile.

The body is a `TuneRequest`. The answer comes when the measurement is done: a table for people, and the folder of the
profile on this machine. The log shows the progress.
"""

import asyncio
import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from ...processes.engine import Engine
from ...settings.resolve import Resolved
from ...tune import measure
from ...tune.request import TuneRequest
from .. import openapi
from ..errors import ApiError
from ..lifecycle import Lifecycle
from ..requests import receive
from ..requests.validation import Limits

logger = logging.getLogger(__name__)


def install(app: FastAPI, resolved: Resolved, engine: Engine, lifecycle: Lifecycle, limits: Limits) -> None:
    """Add the route; one measurement at a time, and only while the server is idle."""
    settings, busy = resolved.settings, asyncio.Lock()

    @app.post("/outrider/tune", openapi_extra=openapi.request_body(TuneRequest))
    async def tune_server(raw: Request) -> JSONResponse:
        request = await receive.receive_as(TuneRequest, raw, limits)
        if not settings.profiled:
            raise ApiError(
                "this server plans nothing by a profile; start it with a drafter", status=409, code="conflict"
            )
        if busy.locked() or lifecycle.in_flight > 1 or not lifecycle.accepting:
            raise ApiError("the server is busy; a measurement needs it idle", status=409, code="conflict")
        async with busy:
            try:
                tuned = await measure.tune(
                    engine,
                    resolved.to_measure(request.name),
                    request.effort,
                    how="outrider tune --server",
                    progress=lambda what, done, total: logger.info("measuring: %s, %d of %d", what, done, total),
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise ApiError(f"not measured: {error}", status=500) from error
        return JSONResponse({"table": tuned.table(), "folder": str(tuned.profile.folder)})
