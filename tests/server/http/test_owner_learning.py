"""Learning per key or adapter: drafters of requests, promotions, roll-backs, removal."""

import asyncio
import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from outrider.drafters.learning.answers import KEYS, Answer, AnswerStore, ServerState, forget
from outrider.drafters.learning.owners import MODEL, Owner, learners, owner_of
from outrider.server.http import learning
from outrider.server.http.keys import admission
from outrider.server.http.keys.key_file import Key
from outrider.server.http.owner_learning import AdapterLearning, KeyLearning, OwnerLearning
from outrider.server.http.requests import receive
from outrider.server.plugin import worker_rpc
from outrider.server.plugin.options import OwnDrafter


class Engine:
    """Scripted refusals, and the messages that it got."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.told: list[tuple[str, Any]] = []

    async def read_live(self, manager: Any) -> list[dict[str, Any]]:
        return [{"exchange": {"in_use": "", "refused": self.refused}}, {"exchange": {"in_use": "", "refused": []}}]

    async def command(self, manager: Any, name: str, value: Any = 1) -> None:
        self.told.append((name, value))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(worker_rpc, "read_live", made.read_live)
    monkeypatch.setattr(worker_rpc, "command", made.command)
    monkeypatch.setattr(learning, "LearnerProcess", lambda settings: SimpleNamespace(running=True))
    return made


def key(name: str, *, learn: bool = True) -> Key:
    return Key(name=name, digest=name.encode() * 4, learn=learn)


def started(folder: Path, *known: Key) -> KeyLearning:
    settings: Any = SimpleNamespace(learn_folder=folder, profile=None)
    idle: Any = SimpleNamespace(idle=True)
    access: Any = SimpleNamespace(keys=list(known))
    return KeyLearning(settings, None, idle, metrics=MagicMock(), access=access)


def look(learns: OwnerLearning) -> None:
    asyncio.run(learns._look())


def drafter(learns: KeyLearning, key: Key) -> str:
    """Name of the learned drafter that serves a key."""
    return learns.drafter_of(key, "").learned


def learned(root: Path, owner: str | Owner, *drafters: str) -> Path:
    """A learner's folder with answers and these candidates; owner: also a key's name."""
    folder = root / (Owner(owner) if isinstance(owner, str) else owner).learner
    AnswerStore(folder, 10**6).append(Answer([1], [2, 3], 0.0))
    for drafter in drafters:
        made = folder / "drafters" / drafter
        made.mkdir(parents=True)
        (made / "config.json").write_text("{}")
        (made / "gate.json").write_text(json.dumps({"candidate_tau": 2.0, "in_use_tau": 1.0}))
    return folder


ANN, BOB = key("ann"), key("bob")


def test_a_full_disk_fails_no_request(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key's drafter is gone, which cannot be recorded."""
    ServerState("0001").write(learned(tmp_path, "ann"))
    learns = started(tmp_path, ANN)

    def full(self: ServerState, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ServerState, "write", full)
    assert [drafter(learns, ANN) for _ in range(2)] == ["", ""]


def test_each_key_gets_its_own_learners_drafters(tmp_path: Path, engine: Engine) -> None:
    learns = started(tmp_path, ANN, BOB)
    assert learns.drafter_of(ANN, "") == OwnDrafter(Owner("ann").learner, secret=ANN.digest.hex())
    ann = learned(tmp_path, "ann", "0001", "0002")
    learned(tmp_path, "bob")
    look(learns)
    assert learns.drafter_of(ANN, "")[:2] == (Owner("ann").learner, "0002")
    assert learns.drafter_of(BOB, "")[:2] == (Owner("bob").learner, "")
    assert drafter(learns, key("ann", learn=False)) == ""
    assert owner_of(ann) == Owner("ann")
    assert ServerState.read(ann) == ServerState("0002")
    assert drafter(started(tmp_path, ANN, BOB), ANN) == "0002"
    assert engine.told == []


def test_a_drafter_that_an_engine_rolled_back(tmp_path: Path, engine: Engine) -> None:
    learns = started(tmp_path, ANN, BOB)
    ann, bob = learned(tmp_path, "ann", "0001"), learned(tmp_path, "bob", "0001")
    look(learns)
    learned(tmp_path, "ann", "0002")
    look(learns)
    engine.refused = [f"keys/{ann.name}/0002"]
    look(learns)
    assert (drafter(learns, ANN), drafter(learns, BOB)) == ("0001", "0001")
    assert ServerState.read(ann) == ServerState("0001", ("0002",))
    engine.refused += [f"keys/{ann.name}/0001", f"keys/{bob.name}/0001"]
    look(learns)
    assert (drafter(learns, ANN), drafter(learns, BOB)) == ("", "")
    look(learns)
    assert ServerState.read(ann) == ServerState(None, ("0002", "0001"))
    metrics: Any = learns.metrics
    assert metrics.rollbacks.inc.call_count == metrics.promotions.inc.call_count == 3
    events = [json.loads(line)["event"] for line in (ann / "events.jsonl").read_text().splitlines()]
    assert events == ["promotion", "promotion", "rollback", "rollback"]


def test_unusable_drafters_are_refused(tmp_path: Path, engine: Engine) -> None:
    learns = started(tmp_path, ANN)
    ann = learned(tmp_path, "ann", "0001")
    (ann / "drafters" / "0001" / "gate.json").unlink()
    look(learns)
    assert ServerState.read(ann) == ServerState(None, ("0001",))
    ServerState("0003").write(ann)
    assert drafter(started(tmp_path, ANN), ANN) == ""
    assert ServerState.read(ann) == ServerState(None, ("0003",))


def test_forgotten_while_it_serves(tmp_path: Path, engine: Engine) -> None:
    learns = started(tmp_path, ANN)
    ann = learned(tmp_path, "ann", "0001")
    look(learns)
    forget(ann)
    look(learns)
    assert drafter(learns, ANN) == ""
    assert engine.told == [(worker_rpc.DROP_OWNER, f"keys/{ann.name}")]


@pytest.mark.parametrize("left", [[], [key("ann", learn=False)]])
def test_a_key_that_is_gone_or_refuses_is_forgotten(tmp_path: Path, engine: Engine, left: list[Key]) -> None:
    learns = started(tmp_path, ANN, BOB)
    ann, bob = learned(tmp_path, "ann", "0001"), learned(tmp_path, "bob", "0001")
    look(learns)
    learns.access.keys[:] = [*left, BOB]
    look(learns)
    assert [path.name for path in ann.parent.iterdir()] == [bob.name]
    assert engine.told == [(worker_rpc.DROP_OWNER, f"keys/{ann.name}")]
    assert drafter(learns, ANN) == ""
    assert drafter(learns, BOB) == "0001"


def test_only_sums_are_shown(tmp_path: Path, engine: Engine) -> None:
    learns = started(tmp_path, ANN, BOB)
    for name, answers, tau in (("ann", 3, 2.0), ("bob", 4, 3.0)):
        numbers = {"phase": "training", "answers": answers, "held_out": 1, "tokens": 5, "anchors": 6, "seconds": 0.5}
        numbers |= {"in_use_tau": tau, "candidate_tau": None, "at": float(answers)}
        (learned(tmp_path, name, "0001") / "learner.json").write_text(json.dumps(numbers))
    look(learns)
    look(learns)
    shown = learns.snapshot()
    assert (shown["answers"], shown["held_out"], shown["learned"], shown["in_use_tau"]) == (7, 2, 2, 2.5)
    assert not [name for name in (*learners(tmp_path, KEYS), "ann", "bob") if str(name) in json.dumps(shown)]
    metrics: Any = learns.metrics
    metrics.in_use.set.assert_called_with(2)
    metrics.training.set.assert_called_with(True)


def test_requests_share_prefixes_within_key_and_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for own in (OwnDrafter("a"), OwnDrafter("a", "1"), OwnDrafter("a", secret="two"), OwnDrafter("b", adapter="lora")):
        current = SimpleNamespace(key_usage=SimpleNamespace(key=ANN))
        monkeypatch.setattr(admission, "current", lambda current=current: current)
        request: Any = SimpleNamespace(model="m")
        find = lambda *given, own=own: given == (ANN, "m") and own  # noqa: E731
        limits: Any = SimpleNamespace(drafter_of=find, looks_across=False)
        receive._set_apart(request, limits)
        assert request._own == own
        seen.add(request.extra_key)
    assert len(seen) == 4
    shared: Any = SimpleNamespace(extra_key=None)
    receive._set_apart(shared, SimpleNamespace(drafter_of=None, looks_across=False))  # type: ignore[arg-type]
    assert shared.extra_key is None


SQL, OTHER_SQL, POEMS = Owner("sql", "1" * 32, "/sql"), Owner("sql", "2" * 32, "/sql"), Owner("poems", "3" * 32, "/p")


def of_adapters(folder: Path, **loaded: Owner) -> tuple[AdapterLearning, dict[str, tuple[str, Owner]]]:
    """Learning of a server with these adapters; and the loaded ones, to change."""
    settings: Any = SimpleNamespace(learn_folder=folder, profile=None)
    owners = {owner.name: (lora_id, owner) for lora_id, owner in loaded.items()}
    idle: Any = SimpleNamespace(idle=True)
    adapters: Any = SimpleNamespace(owners=owners)
    return AdapterLearning(settings, None, idle, metrics=MagicMock(), adapters=adapters), owners


def test_each_adapter_and_the_model_get_their_own_learners_drafters(tmp_path: Path, engine: Engine) -> None:
    learns, _ = of_adapters(tmp_path, first=SQL, second=POEMS)
    for model, drafter in (("m", OwnDrafter(MODEL)), ("sql", OwnDrafter(SQL.learner, adapter="first"))):
        assert learns.drafter_of(None, model) == learns.drafter_of(ANN, model) == drafter
    sql = learned(tmp_path, SQL, "0001")
    AnswerStore(tmp_path, 10**6)
    look(learns)
    assert learns.drafter_of(None, "sql") == OwnDrafter(SQL.learner, "0001", "first")
    assert learns.drafter_of(None, "poems") == OwnDrafter(POEMS.learner, "", "second")
    assert learns.drafter_of(None, "m") == OwnDrafter(MODEL)
    assert owner_of(sql) == SQL
    (tmp_path / "drafters").mkdir()
    (sql / "drafters" / "0001").rename(tmp_path / "drafters" / "0001")
    look(learns)
    assert learns.drafter_of(None, "m") == OwnDrafter(MODEL, "0001")
    engine.refused = [f"{MODEL}/0001"]
    look(learns)
    assert learns.drafter_of(None, "m") == OwnDrafter(MODEL)
    assert learns.drafter_of(None, "sql").learned == "0001"


def test_a_reloaded_adapter_gets_its_drafter_back_and_a_namesake_does_not(tmp_path: Path, engine: Engine) -> None:
    learns, loaded = of_adapters(tmp_path, first=SQL)
    sql = learned(tmp_path, SQL, "0001")
    look(learns)
    del loaded["sql"]
    look(learns)
    assert engine.told == [(worker_rpc.DROP_OWNER, SQL.learner)]
    loaded["sql"] = "second", OTHER_SQL
    assert learns.drafter_of(None, "sql") == OwnDrafter(OTHER_SQL.learner, "", "second")
    look(learns)
    assert (sql / "drafters" / "0001").is_dir()
    loaded["sql"] = "third", SQL
    assert learns.drafter_of(None, "sql") == OwnDrafter(SQL.learner, "0001", "third")
    moved = Owner(SQL.name, SQL.digest, "/elsewhere")
    loaded["sql"] = "fourth", moved
    look(learns)
    assert learns.drafter_of(None, "sql") == OwnDrafter(SQL.learner, "0001", "fourth")
    assert owner_of(sql) == moved
