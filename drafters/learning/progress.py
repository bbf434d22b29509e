"""Publish a learner's progress: learner.json, replaced as a whole, and events.jsonl, which grows."""

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.storage.replacing import replace

WRITE_SECONDS = 3.0


@dataclass
class Numbers:
    """Content of learner.json.

    phase: "waiting", "reading", "training", "gate" or "failed". answers, held_out, tokens: stored answers for training,
    stored answers for the gate, and tokens of both. anchors, steps, gates, candidates, seconds of processor time: spent
    on training since the folder was made. attempts: gates since the last candidate. in_use_tau, candidate_tau: of the
    last gate.
    """

    phase: str = "waiting"
    answers: int = 0
    held_out: int = 0
    tokens: int = 0
    anchors: int = 0
    steps: int = 0
    seconds: float = 0.0
    gates: int = 0
    attempts: int = 0
    candidates: int = 0
    in_use_tau: float | None = None
    candidate_tau: float | None = None
    at: float = 0.0
    error: str = ""


class LearnerProgress:
    """Writes both files of `folder`; counts continue from an earlier process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._written = folder, 0.0
        self.numbers = Numbers()
        with suppress(FileNotFoundError):
            self.numbers = Numbers(**json.loads((folder / "learner.json").read_text(encoding="utf-8")))
        self.numbers.error = ""

    def phase(self, phase: str) -> None:
        if phase != self.numbers.phase:
            self.numbers.phase = phase
            self.write()

    def tick(self) -> None:
        """Write learner.json if it is some seconds old."""
        if time.monotonic() - self._written > WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        self.numbers.at, self._written = round(time.time(), 3), time.monotonic()
        replace({self.folder / "learner.json": json.dumps(asdict(self.numbers)) + "\n"}, 0o600)

    def event(self, name: str, **numbers: Any) -> None:
        """Append a line to events.jsonl, and write learner.json."""
        append_event(self.folder, name, **numbers)
        self.write()


def append_event(folder: Path, name: str, **numbers: Any) -> dict[str, Any]:
    """Append a whole line to `folder`/events.jsonl, which the server also writes; returns the event."""
    event = {"at": round(time.time(), 3), "event": name, **numbers}
    handle = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, json.dumps(event).encode() + b"\n")
    finally:
        os.close(handle)
    return event
