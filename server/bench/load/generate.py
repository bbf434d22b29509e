"""Sends a scenario's requests when they are due, at one load, and keeps what became of each."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

from ..remote import CHAT, Remote, Reply
from . import arrivals
from .arrivals import Traced
from .scenario import Closed, Scenario, Trace
from .workload import Ask, Workload

SECONDS_BEFORE = 0.1
"""The first request is due so long after the start, so that all are ready by then."""
PAUSE_SECONDS = 1.0
"""After which a closed loop's client comes back whose request has failed: one that was refused at once would otherwise
ask a thousand times a second."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request. due: seconds from the load's start; late: seconds until it was really sent, which is ours to blame.
    level: its service level, tokens per second.

    What the user waited counts from when the request was due, so that a client too slow flatters no server.
    """

    name: str
    due: float
    late: float
    reply: Reply
    level: float | None = None

    @property
    def level_kept(self) -> bool:
        """True if the whole answer came at its level, or has none."""
        return not self.reply.failure and self.reply.tpot * (self.level or 0.0) <= 1

    @property
    def ttft(self) -> float:
        return self.late + self.reply.ttft

    @property
    def e2e(self) -> float:
        return self.late + self.reply.seconds

    @property
    def end(self) -> float:
        return self.due + self.e2e


async def at_load(
    remote: Remote, scenario: Scenario, workload: Workload, trace: list[Traced], load: float
) -> list[Record]:
    """Every request due within warm-up and measured time, in the order of their ends; waits for the last answer."""
    until = scenario.warm_up + scenario.seconds
    rng = np.random.default_rng(scenario.seed)
    records: list[Record] = []
    start = time.perf_counter() + SECONDS_BEFORE

    async def one(ask: Ask, due: float) -> Reply:
        late = max(0.0, time.perf_counter() - start - due)
        reply = await remote.ask(CHAT, ask.body, timeout=scenario.timeout)
        records.append(Record(ask.name, due, late, reply, ask.level))
        return reply

    if isinstance(scenario.arrivals, Closed):
        asks = workload.mixed(rng)

        async def user() -> None:
            while (now := max(0.0, time.perf_counter() - start)) < until:
                if (await one(next(asks), now)).failure:
                    await asyncio.sleep(PAUSE_SECONDS)

        await asyncio.gather(*(user() for _ in range(int(load))))
        return records
    async with asyncio.TaskGroup() as group:
        async for due, ask in _when_due(scenario, workload, trace, load, rng, start):
            if due >= until:
                break
            group.create_task(one(ask, due))
    return records


async def _when_due(
    scenario: Scenario, workload: Workload, trace: list[Traced], load: float, rng: np.random.Generator, start: float
) -> AsyncIterator[tuple[float, Ask]]:
    """Requests with their times, each at its time."""
    if isinstance(scenario.arrivals, Trace):
        requests = ((traced.at / load, workload.traced(traced)) for traced in trace)
    else:
        assert not isinstance(scenario.arrivals, Closed)
        # Of a generator of their own, so that at every rate the same requests come.
        when = arrivals.times(scenario.arrivals, load, np.random.default_rng([scenario.seed, 1]))
        requests = ((due, ask) for due, ask in zip(when, workload.mixed(rng), strict=False))
    for due, ask in requests:
        if (wait := start + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        yield due, ask
