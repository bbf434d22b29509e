"""Requests to the real process that compiles grammars."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from in_loop import in_loop
from prometheus_client import CollectorRegistry
from small_grammars import nested_repeats, small_schema, with_options

from outrider.server.http.requests import grammar_process
from outrider.server.http.requests.grammar_process import GrammarMetrics, GrammarProcess
from outrider.server.plugin.grammars.examine import GrammarOutcome, GrammarVerdict
from outrider.server.plugin.grammars.folder import GrammarFolder


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[tuple[GrammarProcess, CollectorRegistry]]:
    """The process and its metrics."""
    with_options(GrammarFolder(folder))
    registry = CollectorRegistry()
    process = GrammarProcess(folder, GrammarMetrics(registry))
    await process.begin()
    try:
        yield process, registry
    finally:
        await process.end()


def counted(registry: CollectorRegistry, outcome: str) -> float:
    return registry.get_sample_value("outrider_grammars_total", {"outcome": outcome}) or 0.0


@pytest.mark.slow
@in_loop
async def test_a_grammar_is_compiled_once_for_all_requests(tmp_path: Path) -> None:
    async with started(tmp_path) as (process, registry):
        schema = small_schema("name")
        verdicts = await asyncio.gather(*(process.examine("json", schema) for _ in range(20)))
        assert {verdict.outcome for verdict in verdicts} == {GrammarOutcome.ACCEPTED}
        assert counted(registry, "accepted") == 1
        await process.examine("json", schema)
        assert counted(registry, "known") == 1
        assert counted(registry, "accepted") == 1


@pytest.mark.slow
@in_loop
async def test_an_abandoned_grammar_is_cancelled(tmp_path: Path) -> None:
    async with started(tmp_path) as (process, registry):
        assert process.running is not None
        compiler = psutil.Process(process.running.pid)
        slow = nested_repeats(8)
        asking = [asyncio.create_task(process.examine("regex", slow)) for _ in range(2)]
        while not compiler.children():
            await asyncio.sleep(0.01)
        first = compiler.children()
        asking[0].cancel()
        assert (await process.examine("json", small_schema("other"))).outcome is GrammarOutcome.ACCEPTED
        assert compiler.children() == first
        asking[1].cancel()
        await asyncio.wait(asking)
        again = asyncio.create_task(process.examine("regex", slow))  # a new request is not cancelled
        assert (await process.examine("json", small_schema("name"))).outcome is GrammarOutcome.ACCEPTED
        assert not set(first) & set(compiler.children())
        assert (await again).outcome in (GrammarOutcome.COSTLY, GrammarOutcome.BUSY)
        assert sum(counted(registry, outcome) for outcome in ("accepted", "costly", "busy")) == 3


@pytest.mark.slow
@in_loop
async def test_a_process_that_was_killed_is_started_again(tmp_path: Path) -> None:
    async with started(tmp_path) as (process, _):
        assert process.running is not None
        waiting = asyncio.create_task(process.examine("regex", nested_repeats(8)))
        await asyncio.sleep(0.2)
        process.running.kill()
        assert (await waiting).outcome is GrammarOutcome.BUSY
        assert (await process.examine("json", small_schema("name"))).outcome is GrammarOutcome.ACCEPTED


def test_carried_grammars_are_kept_within_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "MAX_FOLDER_BYTES", 1000)
    process = GrammarProcess(tmp_path, GrammarMetrics(CollectorRegistry()))
    for index in range(10):
        process.folder.write(str(index), "x" * 300)
        process._remember(str(index), GrammarVerdict(GrammarOutcome.ACCEPTED, carried=300))
    there = [index for index in range(10) if process.folder.read(str(index)) is not None]
    assert there == [7, 8, 9]


@in_loop
async def test_a_process_that_starts_too_slowly_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_process, "START_SECONDS", 0.01)
    with_options(GrammarFolder(tmp_path))
    before = psutil.Process().children()
    process = GrammarProcess(tmp_path, GrammarMetrics(CollectorRegistry()))
    assert (await process.examine("json", small_schema("name"))).outcome is GrammarOutcome.BUSY
    async with asyncio.timeout(5):
        while psutil.Process().children() != before:
            await asyncio.sleep(0.01)
