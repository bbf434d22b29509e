"""Learning of one server: promotions, roll-backs, and its learner."""

import asyncio
import errno
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from in_loop import in_loop

from outrider.drafters.learning.answers import ServerState
from outrider.profiles import store
from outrider.scheduler.calibration.table import Calibration, CalibrationTable
from outrider.server.http import learning
from outrider.server.http.learning import Learning
from outrider.server.plugin import worker_rpc
from outrider.server.plugin.decode.optional.learning import Exchange


class Engines:
    """damaged: name of a folder that the second engine cannot read."""

    def __init__(self, damaged: str = "") -> None:
        self.damaged = damaged

        def reload(folder: str) -> None:
            if self.damaged and folder.endswith(self.damaged):
                raise OSError("damaged")

        drafters: Any = SimpleNamespace(reload=lambda folder: None), SimpleNamespace(reload=reload)
        config: Any = SimpleNamespace(drafter_path="start", learned="")
        self.exchanges = [Exchange(config, drafter) for drafter in drafters]

    async def read_live(self, manager: Any) -> list[dict[str, Any]]:
        return [{"exchange": exchange.state()} for exchange in self.exchanges]

    async def command(self, manager: Any, name: str, value: Any = 1) -> None:
        assert name == worker_rpc.USE
        for exchange in self.exchanges:
            exchange.take(value)

    @property
    def in_use(self) -> list[str]:
        return [Path(exchange.in_use).name for exchange in self.exchanges]


class Process:
    running = False
    failures = 0
    """Starts that fail at first."""

    def __init__(self, settings: Any) -> None:
        self.starts: list[float] = []

    def start(self) -> None:
        self.starts.append(time.monotonic())
        if len(self.starts) <= self.failures:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def pause(self) -> None: ...

    go_on = end = pause


def start(folder: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Learning:
    monkeypatch.setattr(worker_rpc, "read_live", engines.read_live)
    monkeypatch.setattr(worker_rpc, "command", engines.command)
    monkeypatch.setattr(learning, "LearnerProcess", Process)

    async def never(seconds: float) -> None:
        await asyncio.Event().wait()

    traffic: Any = SimpleNamespace(idle=True, wait_until_quiet=never)
    settings: Any = SimpleNamespace(learn_folder=folder, profile=None)
    return Learning(settings, None, traffic, metrics=MagicMock())  # type: ignore[arg-type]


def offer(folder: Path, name: str) -> None:
    made = folder / "drafters" / name
    made.mkdir(parents=True)
    (made / "gate.json").write_text(json.dumps({"candidate_tau": 2.0, "in_use_tau": 1.0}))


def events(folder: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]


def look(learns: Learning) -> None:
    asyncio.run(learns._look())


@pytest.mark.parametrize("damaged", ["", "0002"], ids=["rolls back", "cannot read"])
def test_a_drafter_that_one_engine_refuses_serves_on_none(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = Engines(damaged)
    learns = start(tmp_path, engines, monkeypatch)
    for name in ("0001", "0002"):
        offer(tmp_path, name)
        look(learns)
        assert name == damaged or engines.in_use == [name, name]
    if not damaged:
        second = engines.exchanges[1]
        second.watch._before, second.watch._drafts = 0.9, 1000
        second.begins()
    look(learns)
    assert engines.in_use == ["0001", "0001"]
    assert ServerState.read(tmp_path) == ServerState("0001", ("0002",))
    assert events(tmp_path) == (["promotion"] if damaged else ["promotion", "promotion", "rollback"])


def test_engines_that_share_no_former_drafter_return_to_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One takes a drafter back, and another can no longer read the one before."""
    engines = Engines()
    learns = start(tmp_path, engines, monkeypatch)
    for name in ("0001", "0002"):
        offer(tmp_path, name)
        look(learns)
    engines.damaged = "0001"
    first = engines.exchanges[0]
    first.watch._before, first.watch._drafts = 0.9, 1000
    first.begins()
    for _ in range(4):
        look(learns)
    assert engines.in_use == ["", ""]
    assert ServerState.read(tmp_path) == ServerState(None, ("0002", "0001"))
    assert events(tmp_path) == ["promotion", "promotion", "rollback", "rollback"]


@pytest.mark.parametrize("alike", [True, False])
def test_a_calibration_is_judged_on_held_out_answers(alike: bool, tmp_path: Path) -> None:
    """All drafts of every second answer are accepted; of the rest all or none."""
    answer = np.arange(1200) // 30
    accepted = np.where((answer % 2 == 0) | alike, 3, 0)
    drafts = {"confidence": np.full((1200, 3), 0.6, np.float32), "accepted": accepted, "reach": np.full(1200, 3)}
    np.savez(tmp_path / "held-out.npz", answer=answer, **drafts)
    learning.write_calibration(tmp_path, str(store.SHIPPED / "smollm2-135m-instruct-dspark-zen5-2"))
    fitted = CalibrationTable.load(tmp_path / learning.CALIBRATION).by_class[learning.GREEDY]
    raw = Calibration.identity(fitted.gamma)
    assert (fitted.temperatures == raw.temperatures and fitted.shifts == raw.shifts) is not alike


def test_a_promotion_that_a_full_disk_stops_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    learns = start(tmp_path, engines, monkeypatch)
    offer(tmp_path, "0001")
    look(learns)
    offer(tmp_path, "0002")

    def full(self: ServerState, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ServerState, "write", full)
        with pytest.raises(OSError, match="No space"):
            look(learns)
    look(learns)
    assert engines.in_use == ["0002", "0002"]
    assert ServerState.read(tmp_path) == ServerState("0002")
    assert events(tmp_path) == ["promotion", "promotion"]


@in_loop
async def test_a_full_disk_at_the_start_does_not_end_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has refused the drafter of state.json, and the disk is full."""
    ServerState("0001").write(tmp_path)
    learns = start(tmp_path, Engines(), monkeypatch)
    tried, written = [], ServerState.write

    def full_at_first(self: ServerState, folder: Path) -> None:
        tried.append(self)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, folder)

    monkeypatch.setattr(ServerState, "write", full_at_first)
    monkeypatch.setattr(learning, "LOOK_SECONDS", 0.01)
    running = asyncio.ensure_future(learns.run())
    async with asyncio.timeout(5):
        while len(tried) < 2 and not running.done():
            await asyncio.sleep(0.01)
    assert not running.done()
    assert ServerState.read(tmp_path) == ServerState(None, ("0001",))


@pytest.mark.parametrize("failures", [0, 2])
@in_loop
async def test_an_ended_learner_is_not_restarted_at_once(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "failures", failures)
    learns = start(tmp_path, Engines(), monkeypatch)
    starts = learns.process.starts  # type: ignore[attr-defined]
    monkeypatch.setattr(learning, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(learning, "RESTART_SECONDS", 0.2)
    running = asyncio.ensure_future(learns.run())
    async with asyncio.timeout(10):
        while len(starts) < 4:
            await asyncio.sleep(0.01)
    running.cancel()
    assert min(later - before for before, later in itertools.pairwise(starts)) >= 0.2
