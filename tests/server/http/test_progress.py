"""Engines that stand still, by SGLang's published counters; test_perimeter.py has a real server."""

import asyncio
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.load_snapshot import LoadSnapshot, ShmLoadSnapshotReader, ShmLoadSnapshotWriter, file_lock

from outrider.server.http.progress import EngineProgress

SECONDS = 100.0


class Engine:
    """A tokenizer manager's view: the requests sent, and the schedulers' counters."""

    def __init__(self, path: Path, engines: int) -> None:
        self.writers = [ShmLoadSnapshotWriter(str(path), engines, rank) for rank in range(engines)]
        self.manager = SimpleNamespace(
            load_snapshot_reader=ShmLoadSnapshotReader(str(path), engines), rid_to_state={}, last_receive_tstamp=0.0
        )
        self.progress = EngineProgress(self.manager, SECONDS)
        self.now, self.steps = 1000.0, 0
        self.asked = 0
        self.manager.get_internal_state_communicator = self._asked

    async def _asked(self, request: Any) -> list[Any]:
        self.asked += 1
        return []

    def send(self, name: str, **state: bool) -> None:
        self.manager.rid_to_state[name] = SimpleNamespace(**{"finished": False, "dispatched": True} | state)

    def publish(self, rank: int = 0, **numbers: int) -> None:
        self.writers[rank].write(LoadSnapshot(dp_rank=rank, timestamp=self.now, **numbers))

    def step(self, rank: int = 0, running: int = 1) -> None:
        self.steps += 1
        self.publish(rank, num_running_reqs=running, num_used_tokens=self.steps)

    def after(self, seconds: float, every: float = 5.0) -> float | None:
        """The stall observed this many seconds later."""

        async def main() -> None:
            for _ in range(round(seconds / every)):
                self.now += every
                self.progress.check(self.now)
            await asyncio.sleep(0)

        asyncio.run(main())
        return self.progress.stalled


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "loads", 1)
    made.after(10)
    yield made
    for writer in made.writers:
        writer.close()


def test_work_without_a_step_is_a_stall_and_a_step_ends_it(engine: Engine) -> None:
    engine.send("one")
    engine.step()
    assert engine.after(SECONDS - 10) is None
    assert engine.after(15) == pytest.approx(SECONDS, abs=6)
    assert "no step has ended for 10" in engine.progress.reason
    engine.step()
    assert engine.after(5) is None


def test_an_idle_engine_never_stalls_and_its_first_request_has_all_the_time(engine: Engine) -> None:
    assert engine.after(50 * SECONDS) is None
    engine.send("one")
    assert engine.after(SECONDS - 10) is None
    assert engine.after(20) is not None


def test_a_prompt_that_is_read_slowly_is_progress(engine: Engine) -> None:
    """It is read chunk by chunk, without a token."""
    engine.send("long")
    for chunk in range(20):
        engine.publish(num_used_tokens=chunk * 512)
        assert engine.after(0.9 * SECONDS) is None


def test_requests_that_only_wait_are_none(engine: Engine) -> None:
    engine.send("one")
    for _ in range(30):
        engine.publish(num_waiting_reqs=1)
        engine.after(5)
    assert engine.progress.stalled is not None
    assert engine.asked == 0  # the engine answers, but does no work


@pytest.mark.parametrize("state", [{"finished": True}, {"dispatched": False}], ids=["slow reader", "in the tokenizer"])
def test_requests_that_are_not_the_engines_are_no_stall(engine: Engine, state: dict[str, bool]) -> None:
    engine.send("one", **state)
    assert engine.after(3 * SECONDS) is None


def test_answers_are_progress(engine: Engine) -> None:
    engine.send("one")
    for seconds in range(10):
        engine.manager.last_receive_tstamp = float(seconds)
        assert engine.after(0.9 * SECONDS) is None


def test_a_scheduler_without_work_is_probed(engine: Engine) -> None:
    """A request may be lost, which is no reason to end the server."""
    engine.send("lost")

    async def answer(request: Any) -> list[Any]:
        engine.manager.last_receive_tstamp += 1.0
        return []

    engine.manager.get_internal_state_communicator = answer
    for _ in range(30):
        assert engine.after(SECONDS / 4) is None


def test_one_stalled_engine_of_several_is_a_stall(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "loads", 2)
    engine.after(10)
    engine.send("one")
    engine.send("two")
    engine.step(0)
    engine.step(1)
    for number in range(30):
        engine.step(0)
        engine.manager.last_receive_tstamp = float(number)
        engine.after(5)
    assert engine.progress.stalled is not None
    engine.publish(1)
    assert engine.after(5) is None
    for _ in range(30):
        engine.step(0)
        assert engine.after(5) is None


def test_a_scheduler_stopped_while_it_publishes_delays_no_reader(engine: Engine) -> None:
    engine.send("one")
    engine.step()
    lock = os.open(engine.writers[0].path, os.O_RDWR)
    with file_lock(lock, fcntl.LOCK_EX):
        engine.writers[0].mmap[12:16] = bytes(4)
        assert engine.after(2 * SECONDS) is not None
    os.close(lock)
