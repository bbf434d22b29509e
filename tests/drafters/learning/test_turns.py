"""Learners of several owners: their folders and turns."""

import argparse
import json
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from adapters import write_adapter
from learning_process import events, keep, run

from outrider.drafters.adapter_folder import AdapterFolder
from outrider.drafters.learning import owners, turns
from outrider.drafters.learning.answers import (
    ADAPTERS,
    KEYS,
    Answer,
    AnswerReader,
    AnswerStore,
    ServerState,
    forget,
    sweep,
)
from outrider.drafters.learning.learner import Forgotten
from outrider.drafters.learning.owners import Owner
from outrider.drafters.learning.turns import Turns
from outrider.drafters.training.decode import decode
from outrider.drafters.training.target import TargetModel


class Scripted:
    """Each turn reads the stored answers, and ends by its folder's `plan`."""

    taken: ClassVar[list[str]] = []
    plan: ClassVar[dict[str, list[Any]]] = {}
    adapters: ClassVar[list[Any]] = []

    def __init__(self, args: argparse.Namespace, target: object, **given: Any) -> None:
        self.folder, self.given, self.reader = args.folder, given, AnswerReader(args.folder)
        self.waits = True

    def run(self) -> None:
        name = self.folder.name
        self.taken.append(name)
        self.reader.read()
        (self.folder / "features").mkdir(exist_ok=True)
        (self.folder / "run").mkdir(exist_ok=True)
        step = self.plan.get(name, []).pop(0) if self.plan.get(name) else None
        if isinstance(step, Forgotten):
            forget(self.folder)
        if isinstance(step, BaseException):
            raise step
        if step == "goes on":
            self.waits = False
            while not self.given["turn_over"]():
                self.taken.append("gate")


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(turns, "Learner", Scripted)
    Scripted.taken, Scripted.plan, Scripted.adapters = [], {}, []
    (tmp_path / "features").mkdir()
    args = argparse.Namespace(folder=str(tmp_path), per="key", keys=2, most_feature_bytes=1000)

    def adapted(adapter: Any) -> AbstractContextManager[None]:
        Scripted.adapters.append(adapter)
        return nullcontext()

    target: Any = SimpleNamespace(adapted=adapted)
    return Turns(args, target)


def ask(root: Path, name: str, count: int) -> Path:
    folder = root / KEYS / name
    keep(folder, [Answer([1, 2, i], [3, 4, 5], 0.0) for i in range(count)])
    return folder


def take_all(some: Turns, most: int = 20) -> list[str]:
    Scripted.taken = []
    for _ in range(most):
        if (folder := some.next()) is None:
            break
        some.take(folder)
        some.prune()
    return Scripted.taken


def test_the_key_with_most_new_answers_comes_first(scripted: Turns, tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 9), ("c", 5)):
        ask(tmp_path, name, count)
    assert take_all(scripted) == ["b", "c", "a"]
    assert take_all(scripted) == []
    ask(tmp_path, "a", 1)
    ask(tmp_path, "c", 4)
    assert take_all(scripted) == ["c", "a"]


def test_a_turn_ends_when_another_learner_has_work(scripted: Turns, tmp_path: Path) -> None:
    ask(tmp_path, "a", 9)
    ask(tmp_path, "b", 3)
    Scripted.plan = {"a": ["goes on", "goes on"], "b": ["goes on"]}
    gates = ["gate"] * (turns.TURN_GATES - 1)
    assert take_all(scripted) == ["a", *gates, "b", *gates, "a", *gates, "b", "a"]


def test_features_belong_to_the_last_turn(scripted: Turns, tmp_path: Path) -> None:
    for name, count in (("a", 9), ("b", 5), ("c", 3)):
        ask(tmp_path, name, count)
    take_all(scripted)
    there = {path.parent.name for path in tmp_path.glob("keys/*/features")}
    assert there == {path.parent.name for path in tmp_path.glob("keys/*/run")} == {"b", "c"}
    assert len(AnswerReader(tmp_path / "keys" / "a").read()) == 9


def test_a_failing_key_does_not_stop_the_rest(scripted: Turns, tmp_path: Path) -> None:
    folders = [ask(tmp_path, name, count) for name, count in (("a", 9), ("b", 5), ("c", 3))]
    Scripted.plan = {"a": [ValueError("damaged")], "b": [Forgotten()]}
    assert take_all(scripted, most=3) == ["a", "b", "c"]
    failed = json.loads((folders[0] / "learner.json").read_text())
    assert (failed["phase"], failed["error"]) == ("failed", "damaged")
    assert not (folders[1] / "features").exists()
    Scripted.plan = {"c": [OSError("the disk is full")]}
    ask(tmp_path, "c", 9)
    with pytest.raises(OSError, match="the disk is full"):
        take_all(scripted)


def test_a_key_that_is_removed_meanwhile(scripted: Turns, tmp_path: Path) -> None:
    ask(tmp_path, "b", 1)
    folder = ask(tmp_path, "a", 9)

    class Removed(Scripted):
        def run(self) -> None:
            super().run()
            if self.folder.name == "a":
                owners.forget_owner(self.folder)
                (self.folder / "learner.json").read_text()

    turns.Learner = Removed
    assert take_all(scripted) == ["a", "b"]
    assert not folder.exists()


def test_folders_of_keys(tmp_path: Path) -> None:
    made = owners.make(tmp_path / "root", Owner("ann"))
    assert owners.make(tmp_path / "root", Owner("ann")) == made
    assert owners.learners(tmp_path / "root", KEYS) == [made]
    assert owners.learners(tmp_path / "root", ADAPTERS) == []
    assert owners.owner_of(made) == Owner("ann")
    assert made.parent.name + "/" + made.name == Owner("ann").learner != Owner("bob").learner
    assert not any(path.stat().st_mode & 0o077 for path in (made, made.parent, made / "key.json"))
    assert owners.owner_of(tmp_path) is None
    AnswerStore(made, 10**6).append(Answer([1], [2, 3], 0.0))
    ServerState("0003").write(made)
    forget(tmp_path / "root")
    assert not AnswerReader(made).read()
    assert ServerState.read(made) == ServerState(None, ("0003",))
    forget(made)
    left = made.parent / ".gone.forgotten."
    left.mkdir()
    sweep(tmp_path / "root")
    assert not left.exists()
    owners.forget_owner(made)
    assert list(made.parent.iterdir()) == []
    (made.parent / "thesis").mkdir()
    (made.parent / "thesis" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is no learner's folder"):
        forget(tmp_path / "root")


@pytest.fixture
def adapters(learned_target: Path, tmp_path: Path) -> list[Owner]:
    model, written = TargetModel.load(str(learned_target), dtype=torch.float32).model, []
    for seed, name in enumerate(("sql", "poems")):
        folder = write_adapter(tmp_path / name, model, seed, strength=1.0)
        written.append(Owner(name, AdapterFolder.open(folder).digest(), str(folder)))
    return written


def test_an_adapters_learner_has_the_adapter(scripted: Turns, adapters: list[Owner], tmp_path: Path) -> None:
    scripted.args.per = "adapter"
    sql, poems = (owners.make(tmp_path, owner) for owner in adapters)
    unknown = tmp_path / ADAPTERS / "asked a moment ago"
    for folder, count in ((sql, 9), (poems, 7), (tmp_path, 5), (unknown, 8)):
        keep(folder, [Answer([1, 2, i], [3, 4, 5], 0.0) for i in range(count)])
    assert take_all(scripted) == [sql.name, poems.name, tmp_path.name]
    paths = [adapter and str(adapter.path) for adapter in Scripted.adapters]
    assert paths == [adapters[0].path, adapters[1].path, None]
    second = Path(adapters[1].path)
    (Path(adapters[0].path) / "adapter_model.safetensors").write_bytes(
        (second / "adapter_model.safetensors").read_bytes()
    )
    for folder in (sql, poems):
        keep(folder, [Answer([1, 2, 99], [3, 4, 5], 0.0)])
    assert take_all(scripted) == [poems.name]
    assert "holds another adapter than the adapter sql@" in json.loads((sql / "learner.json").read_text())["error"]


def answers_of(owner: Owner, target: TargetModel, answers: list[Answer]) -> list[Answer]:
    """An adapter's answers to the same prompts."""
    asked = [answer.prompt_ids for answer in answers]
    with target.adapted(owners.adapter_of(owner)):
        texts = decode(
            target, asked, [0.0] * len(asked), max_new_tokens=40, stop_ids=target.stop_ids, seeds=[0] * len(asked)
        )
        return [Answer(asked[text.number], text.ids, 0.0) for text in texts if len(text.ids) > 1]


@pytest.mark.slow
def test_each_adapter_learns_from_its_answers_over_a_kill(
    command: list[str], answers: list[Answer], learned_target: Path, adapters: list[Owner], tmp_path: Path
) -> None:
    """Its answers are foreign for another adapter's learner."""
    root, target = tmp_path / "learner", TargetModel.load(str(learned_target), dtype=torch.float32)
    sql, poems = (owners.make(root, owner) for owner in adapters)
    said = answers_of(adapters[0], target, answers)
    keep(sql, said)
    keep(poems, [*said, *said[:3]])
    keep(root, answers[:30])
    several = [*command, "--per", "adapter", "--keys", "3"]
    assert run(several, "gate") == -signal.SIGKILL
    done = run(
        several,
        until=lambda: events(sql, "candidate") and events(poems, "waiting") and events(root, "waiting"),
        learner__PATIENCE=2,
    )
    assert done == -signal.SIGTERM
    foreign = [sum(event["foreign"] for event in events(folder, "features")) for folder in (sql, poems, root)]
    assert foreign == [0, 2 * (len(said) + 3), 0]  # after the kill it reads them again
    assert (sql / "drafters" / "0001" / "config.json").is_file()
    general = {(folder / "features" / "general" / "tokens.bin").read_bytes() for folder in (sql, poems, root)}
    assert len(general) == 3
