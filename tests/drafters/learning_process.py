"""A learner in a separate process that dies where a test wants it to."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.drafters.learning import gate, learner, process, start, supply
from outrider.drafters.learning.answers import Answer, AnswerStore
from outrider.drafters.learning.drafters import Drafters
from outrider.drafters.training.loop import TrainingRun
from outrider.drafters.training.store import FeatureStore

HURRIED = {
    (start, "GOING_ON"): start.GOING_ON.replace("5e-4", "1e-2") + " --save-seconds 0.2",
    (start, "FROM_NOTHING"): start.FROM_NOTHING.replace("1.2e-3", "1e-2") + " --save-seconds 0.2",
    (gate, "FIRST_GATE"): 40,
    (gate, "GATE_EVERY"): 40,
    (learner, "PAUSE"): 0.05,
}


def keep(folder: Path, answers: list[Answer]) -> None:
    store = AnswerStore(folder, 10**6)
    for answer in answers:
        store.append(answer)
    store.close()


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """The learner's events of this name."""
    path = folder / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in lines if event["event"] == name]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nth(owner: Any, name: str, count: int, *, after: bool = False) -> None:
    """Die before or after the n-th call of a function."""
    real, calls = getattr(owner, name), []

    def mortal(*given: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == count and not after:
            die()
        result = real(*given, **named)
        if len(calls) == count:
            die()
        return result

    setattr(owner, name, mortal)


def half_a_checkpoint() -> None:
    """Die while writing the second checkpoint's file."""
    real, calls = torch.save, []

    def save(state: Any, path: Path) -> None:
        calls.append(None)
        if len(calls) == 2:
            Path(path).write_bytes(b"PK half")
            die()
        real(state, path)

    torch.save = save


FAULTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "writing general answers": lambda: nth(FeatureStore, "append", 3, after=True),
    "reading features": lambda: nth(FeatureStore, "append", 25, after=True),
    "training": lambda: nth(TrainingRun, "update", 30),
    "saving": half_a_checkpoint,
    "gate": lambda: nth(learner, "compare", 1),
    "before a candidate is renamed": lambda: nth(learner, "complete", 1, after=True),
    "after a candidate is renamed": lambda: nth(learner, "offer", 1, after=True),
}


def learn(command: list[str], fault: str, settings: dict[str, Any], trained: str) -> None:
    """Run the learner.

    settings: constants of its modules by "module.NAME". trained: file of steps and tokens; next to it, `followed` gets
    the answers that each drafter followed, and a line "gate" for each comparison.
    """
    os.sched_setscheduler = lambda *_: None  # at a low priority it would hardly run
    os.nice = lambda _: 0
    modules = {"gate": gate, "learner": learner, "start": start, "supply": supply}
    for (module, name), value in HURRIED.items():
        setattr(module, name, value)
    for place, value in settings.items():
        module_name, _, name = place.partition(".")
        setattr(modules[module_name], name, value)
    following = learner.Learner._next_sequence

    def noted(self: learner.Learner, step: int, place: int) -> Any:
        sequence = following(self, step, place)
        with Path(trained).open("a") as file:
            file.write(f"{[step, sequence.tokens.tolist()]}\n")
        return sequence

    learner.Learner._next_sequence = noted
    follow, compare, followed = Drafters.follow, learner.compare, Path(trained).with_name("followed")

    def follow_noted(self: Drafters, drafter: Path, sequences: Any) -> Any:
        sequences = list(sequences)
        with followed.open("a") as file:
            file.write(f"{json.dumps([drafter.name, [s.tokens.tolist() for s in sequences]])}\n")
        return follow(self, drafter, sequences)

    def compare_noted(*given: Any, **named: Any) -> Any:
        with followed.open("a") as file:
            file.write('["gate", []]\n')
        return compare(*given, **named)

    Drafters.follow = follow_noted
    learner.compare = compare_noted
    FAULTS[fault]()
    sys.exit(process.main(command))


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["outrider.drafters.learning.process"])  # the server would not find this module


def run(
    command: list[str],
    fault: str = "",
    *,
    until: Callable[[], object] | None = None,
    seconds: float = 240,
    **settings: Any,
) -> int:
    """Exit status of a learner, negative for a signal; it gets SIGTERM when `until` is true. `trained`, next to the
    folder, gets each step's number and tokens. Settings: `module__NAME=value`."""
    folder = Path(command[command.index("--folder") + 1])
    named = {name.replace("__", "."): value for name, value in settings.items()}
    process = CONTEXT.Process(target=learn, args=(command, fault, named, str(folder.parent / "trained")))
    process.start()
    end = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < end:
        if until is not None and until():
            process.terminate()
            until = None
        process.join(0.05)
    assert not process.is_alive(), process.kill()
    return process.exitcode
