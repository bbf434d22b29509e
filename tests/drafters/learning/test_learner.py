"""The learner: its candidates, its refusals, and resumption after a kill."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from learning_process import FAULTS, events, keep, run

from outrider.drafters import networks
from outrider.drafters.learning import start
from outrider.drafters.learning.answers import Answer, AnswerReader, forget
from outrider.drafters.learning.gate import Patience
from outrider.drafters.learning.learner import BISECTIONS, READ_AT_ONCE, Learner
from outrider.drafters.learning.progress import LearnerProgress
from outrider.drafters.learning.supply import PROMPTS, SEGMENTS, Supply
from outrider.drafters.training.logs import held_out
from outrider.drafters.training.store import digest
from outrider.drafters.training.target import TargetModel

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "learner"


def numbers(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "learner.json").read_text())


def use(folder: Path, in_use: str | None, *refused: str) -> None:
    (folder / "new").write_text(json.dumps({"in_use": in_use, "refused": refused}))
    (folder / "new").replace(folder / "state.json")


def names(folder: Path) -> list[str]:
    return [path.name for path in sorted((folder / "drafters").glob("*"))]


def candidates(folder: Path) -> list[str]:
    """Names of the candidates, which must be complete."""
    for path in sorted((folder / "drafters").glob("*")):
        networks.check(path, {"num_hidden_layers": 6})
        verdict = json.loads((path / "gate.json").read_text())
        assert verdict["reason"] == ""
        assert verdict["chance"] <= verdict["level"]
        arrays = np.load(path / "held-out.npz")
        assert arrays["confidence"].dtype == np.float32
        assert arrays["confidence"].shape == (len(arrays["accepted"]), 7)
        assert (arrays["accepted"] <= arrays["reach"]).all()
        assert arrays["answer"].tolist() == sorted(arrays["answer"])
        assert len(arrays["accepted"]) > 50
    return names(folder)


def waiting(folder: Path, reason: str) -> Callable[[], bool]:
    return lambda: any(event["reason"] == reason for event in events(folder, "waiting"))


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "deer", "specdiff"], indirect=True)
def test_it_goes_on_after_a_kill_anywhere(
    folder: Path, command: list[str], answers: list[Answer], kind: str, request: pytest.FixtureRequest
) -> None:
    """Killed at every stage, it leaves whole files, and loses neither answers nor training. An EAGLE-3 head begins
    untrained."""
    if kind in ("eagle3", "deer") and not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive kills learners of all kinds; files are written alike")
    keep(folder, answers)
    if kind == "eagle3":
        command = [*command, "--start", "target"]
    trained_steps = 0
    passing = {"learner__FIRST_GAIN": 1.01, "gate__CHANCE": 1e6, "gate__GENERAL_KEPT": 0.0, "learner__PATIENCE": 1000}
    for fault in filter(None, FAULTS):
        assert run(command, fault, **passing) == -signal.SIGKILL, fault
        candidates(folder)
        if (folder / "learner.json").exists():
            steps = numbers(folder)["steps"]
            assert steps >= trained_steps
            trained_steps = steps
    name = candidates(folder)[-1]
    use(folder, name)
    log, gates = folder.parent / "trained", len(events(folder, "gate"))
    before, saved = len(log.read_text().splitlines()), torch.load(folder / "run" / "checkpoint.pt")["step"]
    twice = lambda: len(events(folder, "gate")) > gates + 1  # noqa: E731
    # fewer general answers, so that all answers are seen
    settings = {"learner__GENERAL_AIM": 0.0, "learner__GENERAL_LOSS": 0.0}
    assert run(command, until=twice, **settings) == -signal.SIGTERM
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[before][0] == saved > 0
    assert sum(event["answers"] for event in events(folder, "features")) <= len(answers) + 16
    left = [path for path in folder.rglob(".*") if path.is_file() and path.stat().st_size > 10**4]
    assert len(left) <= 1  # the next process deletes it
    for path in (folder, *folder.iterdir()):
        assert path.name == "state.json" or not path.stat().st_mode & 0o077, path

    seen = {tuple(tokens) for _, tokens in lines}
    hidden = {tuple(answer.tokens) for answer in answers if held_out(digest(answer.prompt_ids))}
    assert len(hidden) == 16
    assert len(seen & {tuple(answer.tokens) for answer in answers}) == 30
    assert not seen & hidden
    assert len(seen) == 30 + 4  # four general answers: three for the gate, two of them for the mixture


def test_reading_takes_as_long_as_training_the_newest_answers_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, read = list(range(10 * READ_AT_ONCE)), []

    def slowly(batch: list[int]) -> Any:
        read.append(batch)
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass
        yield len(batch)

    supply = SimpleNamespace(missing=lambda unread: unread, read=slowly, foreign=0, items=[], held_out=[])
    learner = Learner.__new__(Learner)
    vars(learner).update(
        folder=tmp_path, features=tmp_path, made=tmp_path.stat().st_ino, supply=supply,
        progress=LearnerProgress(tmp_path), reader=SimpleNamespace(read=lambda: answers if not read else []),
        unread=[], training=None, lineage=[], patience=Patience(), reading=0.0, stepping=0.0, seen=0,
    )  # fmt: skip
    monkeypatch.setattr(Learner, "_lacks", lambda self: "")
    learner._look()
    assert read == [answers[-READ_AT_ONCE:]]
    learner._look()
    assert len(read) == 1
    learner.stepping = learner.reading + 0.005
    learner._look()
    assert len(read) == 2
    monkeypatch.setattr(Learner, "_lacks", lambda self: "too few answers")
    learner._look()
    assert sorted(answer for batch in read for answer in batch) == answers


def test_a_refused_candidate_is_not_made_again(folder: Path, command: list[str], answers: list[Answer]) -> None:
    keep(folder, answers[:30] + answers[32:])
    assert run(command, until=lambda: candidates(folder)) == -signal.SIGTERM
    (first,) = candidates(folder)
    use(folder, None, first)
    more: list[int] = []

    def offered() -> bool:
        """It waits, gets a tenth more answers, and begins anew from the drafter in use."""
        if not more and waiting(folder, "no better drafter from these answers")():
            more.append(len(events(folder, "training")))
            keep(folder, answers[30:32])
            keep(folder, [Answer([*a.prompt_ids, 5], a.response_ids, 4.0) for a in answers[:6]])
        return bool(more) and names(folder) == ["0002"]  # the refused one is deleted after the next one is complete

    assert run(command, until=offered, supply__LEAST_AGREEMENT=0.1) == -signal.SIGTERM
    assert events(folder, "training")[more[0]]["steps"] == 40
    assert first == "0001"
    assert candidates(folder) == ["0002"]


@pytest.mark.parametrize(("aim", "share", "trained"), [(0.0, 4, 0.75), (100.0, 2, 0.0)])
def test_forgotten_general_answers_are_trained_more_and_weights_mixed(
    folder: Path, command: list[str], answers: list[Answer], aim: float, share: int, trained: float
) -> None:
    keep(folder, answers)
    enough = lambda: len(events(folder, "training")) >= 2  # noqa: E731
    assert run(command, until=enough, learner__GENERAL_AIM=aim, learner__GENERAL_LOSS=aim) == -signal.SIGTERM
    domain = {tuple(answer.tokens) for answer in answers}
    steps = dict(json.loads(line) for line in (folder.parent / "trained").read_text().splitlines())
    general = [step for step, tokens in steps.items() if step < 80 and tuple(tokens) not in domain]
    assert general == [*range(3, 40, 4), *range(40 + share - 1, 80, share)]
    assert {event["share"] for event in events(folder, "gate")} == {trained}
    lines = [json.loads(line) for line in (folder.parent / "followed").read_text().splitlines()]
    once = lines[: lines.index(["gate", []])]
    times = Counter(tuple(tokens) for name, texts in once if name == "candidate" for tokens in texts)
    judging, choosing = [1] * 3, [1 if trained else 1 + BISECTIONS] * 2
    assert sorted(count for tokens, count in times.items() if tokens not in domain) == judging + choosing


def test_each_gate_brings_more_general_answers(
    folder: Path, command: list[str], general: Path, answers: list[Answer]
) -> None:
    general.write_text("".join(json.dumps({"prompt": f"w{i % 9} w{i // 9}"}) + "\n" for i in range(70)))
    keep(folder, answers)
    assert run(command, until=lambda: len(events(folder, "training")) >= 2) == -signal.SIGTERM
    kept = (folder / "features" / "general" / "index.jsonl").read_text().splitlines()
    assert max(int(json.loads(line)["source"]) for line in kept) >= PROMPTS


def shuffled(answers: list[Answer]) -> list[Answer]:
    rng = random.Random(0)
    return [Answer(a.prompt_ids, rng.sample(a.response_ids, len(a.response_ids)), 0.0) for a in answers]


def test_shuffled_answers_are_left_out(folder: Path, command: list[str], answers: list[Answer]) -> None:
    keep(folder, shuffled(answers))
    assert run(command, until=waiting(folder, "too few answers")) == -signal.SIGTERM
    assert sum(event["foreign"] for event in events(folder, "features")) == len(answers)
    assert numbers(folder)["answers"] == numbers(folder)["held_out"] == 0


def test_poison_does_not_pass_the_gate(folder: Path, command: list[str], answers: list[Answer], tmp_path: Path) -> None:
    """A trained drafter is trained on shuffled answers, which the filter lets pass here."""
    keep(folder, answers)
    assert run(command, until=lambda: len(events(folder, "gate")) >= 4) == -signal.SIGTERM
    start = tmp_path / "start"
    (folder / "drafters" / candidates(folder)[-1]).rename(start)
    forget(folder)
    keep(folder, shuffled(answers[:30]) + answers[30:])
    stuck = waiting(folder, "no better drafter from these answers")
    settings = {"supply__LEAST_AGREEMENT": 0.0, "learner__PATIENCE": 3}
    assert run([*command, "--start", str(start)], until=stuck, **settings) == -signal.SIGTERM
    assert numbers(folder)["answers"] == 30
    assert len(events(folder, "gate")) >= 3
    assert not candidates(folder)


@pytest.mark.parametrize("kind", ["dspark", "eagle3", "deer"], indirect=True)
def test_from_random_weights(folder: Path, command: list[str], answers: list[Answer], start_folder: Path) -> None:
    keep(folder, answers)
    command = [*command, "--start", "target"]
    assert run(command, until=lambda: events(folder, "gate"), learner__FIRST_GAIN=50.0) == -signal.SIGTERM
    assert events(folder, "gate")[0]["reason"] in ("less than 50.0 times as good", "not better on held-out answers")
    assert events(folder, "gate")[0]["in_use_tau"] < 1.1  # by lookup alone
    assert not candidates(folder)
    assert run(command, until=lambda: candidates(folder), learner__FIRST_GAIN=1.01) == -signal.SIGTERM
    learned, first = (json.loads((at / "config.json").read_text()) for at in (folder / "drafters/0001", start_folder))
    assert learned == first
    use(folder, "0001")
    gates = len(events(folder, "gate"))
    assert run(command, until=lambda: len(events(folder, "gate")) > gates) == -signal.SIGTERM
    assert events(folder, "gate")[-1]["in_use_tau"] > 1.01


def test_forgetting_begins_anew(folder: Path, command: list[str], answers: list[Answer]) -> None:
    keep(folder, answers)
    done: list[float] = []

    def forgotten() -> bool:
        if not done and events(folder, "training"):
            forget(folder)
            done.append(time.time())
        return bool(done) and waiting(folder, "too few answers")()

    assert run(command, until=forgotten) == -signal.SIGTERM
    assert numbers(folder)["answers"] == numbers(folder)["steps"] == 0
    assert not (folder / "run" / "checkpoint.pt").exists()


def test_other_kinds_are_refused_in_one_line(folder: Path, command: list[str]) -> None:
    assert run([*command, "--kind", "ngram"]) == 1
    assert numbers(folder)["phase"] == "failed"
    assert numbers(folder)["error"] == f"learning drafters are {', '.join(start.KINDS)}, not ngram"


def test_stored_features_are_bounded(tmp_path: Path, learned_target: Path, answers: list[Answer]) -> None:
    target = TargetModel.load(str(learned_target), dtype=torch.float32)
    bound = 200_000
    supply = Supply(tmp_path / "features", target, (1, 3, 4), bound)
    for i in range(0, len(answers), 4):
        for _ in supply.read(answers[i : i + 4]):
            size = sum(path.stat().st_size for path in (tmp_path / "features").rglob("*.bin"))
            assert size <= bound
    assert size > bound * (SEGMENTS - 3) / SEGMENTS
    assert 5 < len(supply.items) < 35
    newest = [answer.tokens for answer in answers[-len(supply.items) :]]
    assert sorted(supply[item].tokens.tolist() for item in supply.items) == sorted(newest)
    again = Supply(tmp_path / "features", target, (1, 3, 4), bound)
    assert again.items == supply.items
    wanted = again.missing(answers)
    assert all(answer.tokens not in newest for answer in wanted)
    assert len(wanted) < 8


def test_features_of_another_target_are_made_again(tmp_path: Path, learned_target: Path, answers: list[Answer]) -> None:
    target = TargetModel.load(str(learned_target), dtype=torch.float32)
    for layers, count in (((1, 3), 0), ((1, 3), 4), ((1, 4), 0)):
        supply = Supply(tmp_path / "features", target, layers, 10**8)
        assert len(supply.items) == count
        for _ in supply.read(answers[:4]):
            assert supply.items


START = """
import os, sys
os.sched_setscheduler = lambda *given: print("class", given[1], flush=True)
os.nice = lambda by: print("nice", by, flush=True)
from outrider.drafters.learning import learner, process
learner.PAUSE = 0.05
sys.exit(process.main(sys.argv[1:]))
"""


def state_of(pid: int) -> str:
    """Letter of a process's state; empty if it is gone or a zombie."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if letter == "Z" else letter


def within(seconds: float, condition: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_stopped_continued_ended_and_orphaned(folder: Path, command: list[str], answers: list[Answer]) -> None:
    """While stopped, it still ends when its parent is killed."""
    keep(folder, answers)
    parent = (
        "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); time.sleep(900)"
    )
    learner = [sys.executable, "-c", START, *command]
    with subprocess.Popen([sys.executable, "-c", parent, *learner], stdout=subprocess.PIPE, text=True) as server:
        pid = int(server.stdout.readline())
        assert sorted(server.stdout.readline() for _ in range(2)) == ["class 5\n", "nice 19\n"]
        for _ in range(5):
            subprocess.run(["kill", "-STOP", str(pid)], check=True)
            time.sleep(0.2)
            assert state_of(pid) == "T"
            subprocess.run(["kill", "-CONT", str(pid)], check=True)
            time.sleep(0.2)
        within(120, lambda: events(folder, "training"))
        subprocess.run(["kill", "-STOP", str(pid)], check=True)
        server.kill()
        within(60, lambda: not state_of(pid))
    log = folder.with_name("log")
    with log.open("w") as errors, subprocess.Popen(learner, stdout=subprocess.DEVNULL, stderr=errors) as process:
        count = len(events(folder, "training"))
        within(120, lambda: len(events(folder, "training")) > count)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert "Loading" not in log.read_text()  # a bar would cut lines of the server's log
    assert len(AnswerReader(folder).read()) == len(answers)
