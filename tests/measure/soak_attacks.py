"""Requests of a client that wants to hurt the others: oversized, malformed, expensive, or never finished.

Each is one that once stopped or slowed a server. A right server refuses or answers it soon, and nobody else notices.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from outrider.server.bench.remote import CHAT, TEXT, Remote

PAUSE_SECONDS = 1.0
"""Between two attacks of one client."""
NEVER_ENDING_SECONDS = 45.0
"""Longest time that a body without an end is held open; a server that bounds this closes the connection before."""
HEALTH_SECONDS = 0.2
"""Between two questions for /health."""
FOREIGN_HOST = "attacker.example"
CLOSED, OPEN = "closed", "still open"
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Attack:
    """One request. body: sent as JSON, None for a GET. never_ends: the body is announced longer than what is sent."""

    path: str
    body: Mapping[str, Any] | None
    headers: Mapping[str, str] = field(default_factory=dict)
    never_ends: bool = False


@dataclass(slots=True)
class Attacked:
    """Results of the attacks, by kind.

    outcomes: counts of statuses. slowest: seconds. health: slowest answer of /health, seconds, without attackers and
    with them.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    health: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, kind: str, outcome: str, seconds: float) -> None:
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        self.slowest[kind] = max(seconds, self.slowest.get(kind, 0.0))

    def plain(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        outcomes = {kind: dict(found) for kind, found in self.outcomes.items()}
        return {"outcomes": outcomes, "slowest": self.slowest, "health": self.health}

    def server_errors(self) -> list[str]:
        """Attacks that were answered with a 5xx, or that ended the connection without an answer."""
        found = []
        for kind, outcomes in self.outcomes.items():
            bad = [name for name in outcomes if name.startswith("5") or name in ("connection", OPEN)]
            found += [f"{kind}: {outcomes[name]} × {name}" for name in bad]
        return found


def _chat(**fields: Any) -> Attack:
    return Attack(CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields})


def _nested_repeats(random_: random.Random) -> Attack:
    inner = f"(a{random_.randrange(10**6)}{{1,50}}b{{1,50}}){{1,50}}"
    return _chat(regex=f"(({inner}|{inner}){{1,50}}|c)+"[:2048])


def _schema(properties: Mapping[str, Any]) -> Attack:
    schema = {"type": "object", "properties": properties}
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})


def _large_schema(random_: random.Random) -> Attack:
    field_of = {"type": "string", "pattern": "^[a-z]{1,200}$", "maxLength": 900}
    return _schema({f"field_{random_.randrange(10**9)}_{i}": field_of for i in range(110)})


def _new_grammar(random_: random.Random) -> Attack:
    words = [str(random_.randrange(10**9)) for _ in range(20)]
    return _schema({word: {"enum": words} for word in words})


def _foreign_host(random_: random.Random) -> Attack:
    path = random_.choice(["/v1/models", "/metrics", "/outrider/live", "/docs/"])
    return Attack(path, None, {"Host": FOREIGN_HOST})


def _messages(content: Any, count: int = 1) -> Attack:
    return _chat(messages=[{"role": "user", "content": content}] * count)


ATTACKS: dict[str, Callable[[random.Random], Attack]] = {
    "top_k beyond int32": lambda _: _chat(top_k=1 << 31, temperature=1.0),
    "wrong content parts": lambda _: _messages([{"type": "text", "txt": "x"}] * (MB // 2 // 28)),
    "nested repeats": _nested_repeats,
    "large schema": _large_schema,
    "a new grammar each": _new_grammar,
    "prompt of 4 MB": lambda _: Attack(TEXT, {"prompt": "long prompt " * (4 * MB // 12), "max_tokens": 8}),
    "stop strings of 4 MB": lambda _: _chat(stop=["stop here " * (MB // 10)] * 4),
    "small messages, 3 MB": lambda _: _messages("a", 3 * MB // 34),
    "49,152 stop tokens": lambda _: _chat(stop_token_ids=list(range(49_152))),
    "bias key of 5,000 digits": lambda _: _chat(logit_bias={"9" * 5000: 1.0}),
    "a body that never ends": lambda _: Attack(CHAT, {"messages": []}, never_ends=True),
    "a foreign host": _foreign_host,
}
VARYING = {"nested repeats", "large schema", "a new grammar each", "a foreign host"}
"""Kinds that send another request each time. The others' are written once: megabytes take this process a while, in
which it would not see the answers of others."""


class Attacker:
    """Sends one kind of attack, as often as it is told, and notes what became of it."""

    def __init__(self, remote: Remote, kind: str, seed: int, timeout: float, attacked: Attacked) -> None:
        self.remote = remote
        self.kind = kind
        self.timeout = timeout
        self.attacked = attacked
        self._random = random.Random(f"{seed} {kind}")
        self._made, self._body = self._make()

    async def attack(self) -> None:
        if self.kind in VARYING:
            self._made, self._body = self._make()
        start = time.perf_counter()
        if self._made.never_ends:
            outcome = await _hold_open(self.remote, self._made, self._body)
        else:
            outcome = await _send(self.remote, self._made, self._body, self.timeout)
        self.attacked.add(self.kind, outcome, time.perf_counter() - start)

    def _make(self) -> tuple[Attack, bytes]:
        made = ATTACKS[self.kind](self._random)
        return made, b"" if made.body is None else json.dumps({"model": self.remote.model, **made.body}).encode()


async def _send(remote: Remote, made: Attack, body: bytes, timeout: float) -> str:
    headers = {"Content-Type": "application/json", **made.headers}
    options: dict[str, Any] = {"headers": headers, "data": body or None, "allow_redirects": False}
    options["timeout"] = aiohttp.ClientTimeout(total=timeout)
    try:
        method = "GET" if made.body is None else "POST"
        async with remote.session.request(method, remote.url + made.path, **options) as response:
            await response.read()
            return str(response.status)
    except TimeoutError:
        return "timeout"
    except aiohttp.ClientError:
        return "connection"


async def _hold_open(remote: Remote, made: Attack, body: bytes) -> str:
    """Announce a body, send its beginning, and wait for the server to lose patience."""
    parts = urlsplit(remote.url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
    except OSError:
        return "connection"
    authorization = remote.session.headers.get("Authorization")
    lines = [f"POST {made.path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    lines += [f"Content-Length: {MB}", *([f"Authorization: {authorization}"] if authorization else []), "", ""]
    try:
        writer.write("\r\n".join(lines).encode() + body[:-1])
        async with asyncio.timeout(NEVER_ENDING_SECONDS):
            answer = await reader.read()
        return answer.split()[1].decode() if answer.startswith(b"HTTP/1.1 ") else CLOSED
    except TimeoutError:
        return OPEN
    except OSError:
        return CLOSED
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def watch_health(remote: Remote, attacked: Attacked, under_attack: Callable[[], bool]) -> None:
    """Keep asking for /health and note the slowest answers, until cancelled."""
    while True:
        during, start = under_attack(), time.perf_counter()
        try:
            async with remote.session.get(f"{remote.url}/health") as response:
                await response.read()
                good = response.status == HTTPStatus.OK
        except aiohttp.ClientError:
            good = False
        seconds = time.perf_counter() - start
        attacked.health[during] = max(attacked.health[during], seconds)
        if not good:
            attacked.add("/health", "503", seconds)
        await asyncio.sleep(HEALTH_SECONDS)
