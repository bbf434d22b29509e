"""Work in idle time: only while nobody is served, given up when a request arrives, and begun again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from outrider.server.http.lifecycle import Lifecycle, State
from outrider.server.http.listen import _until_ending
from outrider.server.tune.idle import Idle


def traffic() -> Lifecycle:
    """That of a server that takes requests and has none."""
    lifecycle = Lifecycle(SimpleNamespace(dead_processes=list), drain_seconds=1.0)
    lifecycle.state = State.UP
    return lifecycle


async def settle() -> None:
    """Let everybody run who can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_piece_is_given_up_for_a_request_and_begun_again() -> None:
    async def scenario() -> list[str]:
        server, seen = traffic(), []
        finish = asyncio.Event()

        async def piece() -> str:
            seen.append("begun")
            try:
                await finish.wait()
            except asyncio.CancelledError:
                seen.append("given up")
                raise
            return "done"

        running = asyncio.ensure_future(Idle(server, quiet_seconds=0).run(piece))
        await settle()
        assert seen == ["begun"]
        with server.request():
            await settle()
            assert seen == ["begun", "given up"]  # before the request had anything to wait for
            await asyncio.sleep(0.6)
            assert len(seen) == 2
        finish.set()
        assert await asyncio.wait_for(running, 5) == "done"
        return seen

    assert asyncio.run(scenario()) == ["begun", "given up", "begun"]


def test_nothing_is_begun_until_it_has_been_quiet_for_long_enough() -> None:
    async def scenario() -> None:
        server = traffic()
        begun = asyncio.Event()

        async def piece() -> None:
            begun.set()

        running = asyncio.ensure_future(Idle(server, quiet_seconds=0.7).run(piece))
        with server.request():
            await asyncio.sleep(0.9)
        await asyncio.sleep(0.5)
        assert not begun.is_set()
        await asyncio.wait_for(running, 5)

    asyncio.run(scenario())


def test_a_server_that_stops_is_left_alone() -> None:
    async def scenario() -> None:
        server, begun, given_up = traffic(), 0, 0

        async def piece() -> None:
            nonlocal begun, given_up
            begun += 1
            try:
                await asyncio.Event().wait()
            finally:
                given_up += 1

        running = asyncio.ensure_future(Idle(server, quiet_seconds=0).run(piece))
        await settle()
        server._on_stop_signal()
        await asyncio.sleep(0.6)
        assert (begun, given_up) == (1, 1)
        running.cancel()

    asyncio.run(scenario())


def test_what_a_piece_raises_is_raised() -> None:
    async def broken() -> None:
        raise RuntimeError("no step")

    async def scenario() -> None:
        await Idle(traffic(), quiet_seconds=0).run(broken)

    with pytest.raises(RuntimeError, match="no step"):
        asyncio.run(scenario())


def test_a_measurement_before_the_first_request_ends_with_the_engine() -> None:
    """What asks a dead engine waits for ever, and the start with it."""

    async def scenario() -> None:
        server = Lifecycle(SimpleNamespace(dead_processes=list, fail_requests=lambda reason: None), drain_seconds=1.0)
        measurement = asyncio.ensure_future(_until_ending(server, asyncio.Event().wait()))
        await settle()
        assert not measurement.done()
        server.fail("scheduler died")
        with pytest.raises(RuntimeError, match="died"):
            await asyncio.wait_for(measurement, 5)

    asyncio.run(scenario())


def test_a_signal_while_it_measures_at_its_start_ends_that_too() -> None:
    async def scenario() -> None:
        server, given_up = Lifecycle(None, drain_seconds=1.0), asyncio.Event()

        async def measure() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        measurement = asyncio.ensure_future(_until_ending(server, measure()))
        await settle()
        server._on_stop_signal()
        await asyncio.wait_for(measurement, 5)
        await asyncio.wait_for(given_up.wait(), 5)
        assert server.exit_code == 0

    asyncio.run(scenario())
