"""A measurement under way: one JSON line per measured shape, so that a killed `outrider tune` goes on where it was."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.scheduler.cost.step_times import Point
from outrider.storage.appending import appending
from outrider.storage.replacing import replace

from .fingerprint import Fingerprint

SCHEMA = 3

ShapeKey = tuple[int, int, float]
"""Requests, tokens and cached tokens of a step. The points of its measurement may have other numbers."""


class PartialMeasurement:
    """The points measured so far, on disk as soon as `add` returns.

    path: the file, made if it is missing. fingerprint: of the engine. points: earlier ones of the same engine in the
    file, and all added since. times: how often each shape was measured. seconds: time spent measuring so far.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint):
        self.path = path
        self.points: list[Point] = []
        self.times: Counter[ShapeKey] = Counter()
        self.seconds = 0.0
        header = json.dumps({"schema": SCHEMA, "fingerprint": fingerprint.to_json()})
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # a kill may have torn the last
        except FileNotFoundError:
            lines = []
        kept = [header, *filter(self._read, lines[1:] if lines[:1] == [header] else ())]
        path.parent.mkdir(parents=True, exist_ok=True)
        replace({path: "\n".join(kept) + "\n"})  # also drops a torn line, which must not be appended to

    def add(self, shape: ShapeKey, points: Sequence[Point]) -> None:
        """Append the points of one measurement of a shape; when this returns they survive a kill."""
        self._append({"shape": shape, "points": [point.to_json() for point in points]})

    def spend(self, seconds: float) -> None:
        """Count time; when this returns that survives a kill."""
        self._append({"seconds": seconds})

    def _append(self, content: Any) -> None:
        line = json.dumps(content)
        with appending(self.path, every=1) as append:
            append(line)
        self._read(line)

    def discard(self) -> None:
        """Remove the file, once its points are in a profile."""
        self.path.unlink(missing_ok=True)

    def _read(self, line: str) -> bool:
        """Count a line; return False if it is damaged: that shape is measured again."""
        try:
            content = json.loads(line)
            if "seconds" in content:
                self.seconds += float(content["seconds"])
            else:
                points = [Point.from_json(each) for each in content["points"]]
                self.times[tuple(content["shape"])] += 1
                self.points += points
        except (ValueError, TypeError, KeyError):
            return False
        return True
