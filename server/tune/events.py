"""Events of a measurement: for progress bars, and over HTTP as a line of JSON each.

{"progress": ["step times", 3, 12]}
{"table": "...", "folder": "..."} or {"error": "..."}, the last one
"""

import json
from dataclasses import asdict, astuple, dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a task. what: its name. done, total: units of it."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Finished:
    """table: the measurement for people. folder: of the profile, on the machine that measured."""

    table: str
    folder: str


@dataclass(frozen=True, slots=True)
class Failed:
    """error: why the measurement failed."""

    error: str


Event = Progress | Finished | Failed


def to_line(event: Event) -> str:
    """Return the event as a line of JSON, with its newline."""
    fields = {"progress": astuple(event)} if isinstance(event, Progress) else asdict(event)
    return json.dumps(fields) + "\n"


def from_line(line: str | bytes) -> Event:
    """Read an event from a line of `to_line`."""
    fields = json.loads(line)
    if "progress" in fields:
        return Progress(*fields["progress"])
    return Failed(**fields) if "error" in fields else Finished(**fields)
