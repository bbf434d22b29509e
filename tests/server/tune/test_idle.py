"""Work in idle time."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
from in_loop import in_loop

from outrider.server.http.lifecycle import Lifecycle, State
from outrider.server.http.listen import _until_stopping
from outrider.server.tune.idle import Idle, IdleBudget


def traffic() -> Lifecycle:
    lifecycle = Lifecycle(SimpleNamespace(dead_processes=list), drain_seconds=1.0)
    lifecycle.state = State.UP
    return lifecycle


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@in_loop
async def test_a_piece_is_cancelled_for_a_request_and_begun_again() -> None:
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
        assert seen == ["begun", "given up"]  # before the request waits
        await asyncio.sleep(0.6)
        assert len(seen) == 2
    finish.set()
    assert await asyncio.wait_for(running, 5) == "done"
    assert seen == ["begun", "given up", "begun"]


@pytest.mark.slow
@in_loop
async def test_no_piece_begins_before_a_quiet_time() -> None:
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


@pytest.mark.parametrize("end", [Lifecycle._on_stop_signal, partial(Lifecycle.fail, reason="the engine died")])
@in_loop
async def test_a_server_that_stops_is_left_alone(end: Callable[[Lifecycle], None]) -> None:
    server, begun, given_up = traffic(), 0, 0
    server.engine.fail_requests = lambda reason: None  # type: ignore[method-assign]

    async def piece() -> None:
        nonlocal begun, given_up
        begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            given_up += 1

    running = asyncio.ensure_future(Idle(server, quiet_seconds=0).run(piece))
    await settle()
    end(server)
    await asyncio.sleep(0.6)
    assert (begun, given_up) == (1, 1)
    running.cancel()


@in_loop
async def test_a_caller_that_is_cancelled_while_a_piece_is_given_up_ends() -> None:
    """A server may stop before its engine has confirmed."""
    server = traffic()

    async def piece() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    running = asyncio.ensure_future(Idle(server, quiet_seconds=0).run(piece))
    await settle()
    with server.request():
        await settle()
    running.cancel()
    await asyncio.wait({running}, timeout=2)
    assert running.cancelled()


@in_loop
async def test_a_pieces_error_is_raised() -> None:
    async def broken() -> None:
        raise RuntimeError("no step")

    with pytest.raises(RuntimeError, match="no step"):
        await Idle(traffic(), quiet_seconds=0).run(broken)


@in_loop
async def test_a_measurement_before_the_first_request_ends_with_the_engine() -> None:
    """A request to a dead engine would wait for ever."""
    server = Lifecycle(SimpleNamespace(dead_processes=list, fail_requests=lambda reason: None), drain_seconds=1.0)
    measurement = asyncio.ensure_future(_until_stopping(server, asyncio.Event().wait()))
    await settle()
    assert not measurement.done()
    server.fail("scheduler died")
    with pytest.raises(RuntimeError, match="died"):
        await asyncio.wait_for(measurement, 5)


@in_loop
async def test_a_signal_while_it_measures_at_its_start_ends_that_too() -> None:
    server, given_up = Lifecycle(None, drain_seconds=1.0), asyncio.Event()

    async def measure() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    measurement = asyncio.ensure_future(_until_stopping(server, measure()))
    await settle()
    server._on_stop_signal()
    await asyncio.wait_for(measurement, 5)
    await asyncio.wait_for(given_up.wait(), 5)
    assert server.exit_code == 0


@pytest.mark.slow
@in_loop
async def test_rests_keep_one_core_busy_on_average() -> None:
    idle = Idle(traffic(), quiet_seconds=0, cores=3)
    begun = time.monotonic()
    for _ in range(3):
        await idle.run(partial(asyncio.sleep, 0.2))
    assert time.monotonic() - begun >= 0.2 * (1 + 3 + 3)


@in_loop
async def test_a_budget_counts_work_and_not_the_waiting_for_it() -> None:
    budget = IdleBudget(0.3, spent=0.1)
    for exhausted in (False, True):
        await asyncio.sleep(0.2)
        await budget.timed(partial(asyncio.sleep, 0.15))()
        assert budget.exhausted == exhausted
    assert not IdleBudget(None, spent=1e9).exhausted
