"""Requests to an OpenAI server by URL, with the times of each answer. A failure is a result, not an exception."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp

from ..errors import UserError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK_SECONDS = 30
"""Time limit for requests about the server itself."""

LINE_BYTES = 1 << 20
"""Longest event of a stream; the logprobs of a long prompt make a large one."""


@dataclass(slots=True)
class Reply:
    """One answer, whole or not. Times in seconds, from the request.

    failure: empty if the whole answer came; else the HTTP status, "connection", "timeout" or "stream" (broke off or
    held an error). detail: the server's message about the failure.
    text: of the answer, its reasoning and its tool calls' arguments. ttft: to the first piece of text, 0 without text.
    gaps: between pieces. completion_tokens: the server's count, or
    without one the number of pieces.
    """

    failure: str = ""
    detail: str = ""
    status: int = 0
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list, repr=False)
    seconds: float = 0.0

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 without such tokens."""
        return (self.seconds - self.ttft) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Remote:
    """An OpenAI server and the requested model; made by `connect`."""

    url: str
    model: str
    session: aiohttp.ClientSession = field(repr=False)

    async def ask(self, path: str, body: Mapping[str, Any], *, timeout: float, into: Reply | None = None) -> Reply:
        """Send a request for one choice and read the whole answer, streamed if the body says so.

        timeout: seconds until the request fails. into: the reply to fill, so that a caller can watch it.
        """
        reply, start = into or Reply(), time.perf_counter()
        whole = {"model": self.model, **body}
        if whole.get("stream"):
            whole["stream_options"] = {"include_usage": True}
        try:
            async with asyncio.timeout(timeout):
                async with self.session.post(self.url + path, json=whole) as response:
                    reply.status = response.status
                    await _read(response, reply, start)
        except TimeoutError:
            reply.failure = "timeout"
        except aiohttp.ClientConnectionError as error:
            reply.failure, reply.detail = "stream" if reply.status else "connection", str(error)
        except (aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError) as error:
            reply.failure, reply.detail = "stream", repr(error)
        reply.seconds = time.perf_counter() - start
        return reply


@asynccontextmanager
async def connect(url: str, key: str | None = None, model: str | None = None) -> AsyncIterator[Remote]:
    """The server at `url` (with or without /v1). model: None for the first that it lists.

    Raises UserError if no OpenAI server answers there.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--url {url}: give it as http://HOST:PORT")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No limit of connections, and a new one for each request: some servers close used connections without notice.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=None), "read_bufsize": LINE_BYTES}
    async with aiohttp.ClientSession(headers=headers, connector=connector, **options) as session:
        yield Remote(url, model or await _first_model(session, url), session)


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with asyncio.timeout(ASK_SECONDS), session.get(f"{url}/v1/models") as response:
            if response.status != HTTPStatus.OK:
                raise UserError(f"{url}/v1/models answers {response.status}: {(await response.text())[:200]}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UserError(f"no server answers at {url}: {error or 'it took too long'}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"{url}/v1/models does not list models as OpenAI's does; name one with --model") from None


async def _read(response: aiohttp.ClientResponse, reply: Reply, start: float) -> None:
    if response.status != HTTPStatus.OK:
        reply.failure, reply.detail = str(response.status), (await response.text())[:500]
    elif response.content_type == "text/event-stream":
        await _read_stream(response, reply, start)
    else:
        answer = await response.json()
        _take(answer, reply)
        reply.ttft = time.perf_counter() - start


async def _read_stream(response: aiohttp.ClientResponse, reply: Reply, start: float) -> None:
    """Read server-sent events: each has a piece of the text, the last but one the usage; the last is [DONE]."""
    latest, pieces = 0.0, 0
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            reply.completion_tokens = reply.completion_tokens or pieces
            return
        event = json.loads(data)
        if "error" in event:
            reply.failure, reply.detail = "stream", json.dumps(event["error"])[:500]
            return
        if not _take(event, reply):
            continue
        now, pieces = time.perf_counter() - start, pieces + 1
        if latest:
            reply.gaps.append(now - latest)
        reply.ttft, latest = reply.ttft or now, now
    reply.failure, reply.detail = "stream", "it ended without [DONE]"


def _take(answer: Mapping[str, Any], reply: Reply) -> bool:
    """Add an answer, or a piece of one, to the reply; return True if it has text, such as arguments of a tool call."""
    if usage := answer.get("usage"):
        reply.prompt_tokens, reply.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    text = ""
    for choice in answer["choices"]:
        said = choice.get("message") or choice.get("delta") or choice
        arguments = "".join(call["function"].get("arguments") or "" for call in said.get("tool_calls") or ())
        text = said.get("content") or said.get("reasoning_content") or said.get("text") or arguments
        reply.text += text
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    return bool(text)
