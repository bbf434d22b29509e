"""Sends a scenario's requests at their due times, at one load, and records the replies."""

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
"""Time from the start to the first due request, so that all clients are ready."""
PAUSE_SECONDS = 1.0
"""Pause of a closed loop's client after a failed request; without it, a client refused at once would send a thousand
requests per second."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request. due: seconds from the load's start. late: our delay until it was sent, seconds. level: its service
    level, tokens per second.

    Waiting time counts from the due time, so that a slow client does not make a server look faster.
    """

    name: str
    due: float
    late: float
    reply: Reply
    level: float | None = None

    @property
    def level_kept(self) -> bool:
        """True if the whole answer came at its service level, or has no level."""
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
    """Send every request due in warm-up and measured time; wait for the last answer. In the order of their ends."""
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
    """Yield each request with its due time, at that time."""
    if isinstance(scenario.arrivals, Trace):
        requests = ((traced.at / load, workload.traced(traced)) for traced in trace)
    else:
        assert not isinstance(scenario.arrivals, Closed)
        # A separate generator for times, so that every rate has the same requests.
        when = arrivals.times(scenario.arrivals, load, np.random.default_rng([scenario.seed, 1]))
        requests = ((due, ask) for due, ask in zip(when, workload.mixed(rng), strict=False))
    for due, ask in requests:
        if (wait := start + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        yield due, ask
