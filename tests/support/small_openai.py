"""An OpenAI-compatible server without a model, with scripted times and failures, to test benchmarks."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self

import pytest
from aiohttp import web

from outrider.server.cli.main import main

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class SmallServer:
    """`handler` answers chat completions at `url`; `asked` holds the bodies, in order."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.asked: list[dict[str, Any]] = []
        self.gauges = ""
        self.live: dict[str, Any] = {}
        self.ready = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self) -> str:
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/outrider/live", self._live)
        for path in ("/ready", "/health"):
            app.router.add_get(path, self._ready)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        return await self.handler(request, body)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "small"}]})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=200 if self.ready else 503)

    async def _live(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.live)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.gauges)


async def answer(
    request: web.Request,
    body: dict[str, Any],
    *,
    text: str = "a b c d",
    ttft: float = 0.0,
    tpot: float = 0.0,
    free: asyncio.Event | None = None,
) -> web.StreamResponse:
    """The words of `text`, at most max_tokens; a word is a token. free: each word waits for it."""
    words = text.split()[: body["max_tokens"]]
    count = len(body["messages"][0]["content"].split())
    usage = {"prompt_tokens": 3 + 2 * count, "completion_tokens": len(words)}
    await asyncio.sleep(ttft)
    if not body.get("stream"):
        message = {"message": {"content": " ".join(words)}, "finish_reason": "stop"}
        return web.json_response({"choices": [message], "usage": usage})
    response = await begun(request)
    for index, word in enumerate(words):
        if index:
            await asyncio.sleep(tpot)
        if free:
            await free.wait()
        await send(response, {"choices": [{"delta": {"content": word if not index else f" {word}"}}]})
    await send(response, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
    await send(response, {"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    return response


async def begun(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def load(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main(["bench", "load", *flags])
    return code, capsys.readouterr().out
