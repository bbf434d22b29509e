"""A measurement under way: one JSON line per measured point, so that a killed `outrider tune` goes on where it was."""

import json
import os
from pathlib import Path
from typing import Any

from outrider.scheduler.cost.step_times import Point
from outrider.storage.replacing import replace

from .fingerprint import Fingerprint

SCHEMA = 2


class PartialMeasurement:
    """The points measured so far, on disk as soon as `add` returns.

    path: the file, made if it is missing. fingerprint: of the engine. points: earlier ones of the same engine in the
    file, and all added since. seconds: time spent measuring so far.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint):
        self.path = path
        self.points: list[Point] = []
        self.seconds = 0.0
        header = json.dumps({"schema": SCHEMA, "fingerprint": fingerprint.to_json()})
        if (lines := self._complete_lines()) and self._is_of(lines[0], fingerprint):
            self._read(lines[1:])
        spent = [json.dumps({"seconds": self.seconds})] if self.seconds else []
        kept = [header, *spent, *(json.dumps(point.to_json()) for point in self.points)]
        path.parent.mkdir(parents=True, exist_ok=True)
        replace({path: "\n".join(kept) + "\n"})  # also drops a torn line, which must not be appended to

    def add(self, point: Point) -> None:
        """Append a point; when this returns it survives a kill."""
        self._append(point.to_json())
        self.points.append(point)

    def spend(self, seconds: float) -> None:
        """Count time; when this returns that survives a kill."""
        self._append({"seconds": seconds})
        self.seconds += seconds

    def _append(self, line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def discard(self) -> None:
        """Remove the file, once its points are in a profile."""
        self.path.unlink(missing_ok=True)

    def _complete_lines(self) -> list[str]:
        """Return the lines that end; a kill may leave the last one torn."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        return text.split("\n")[:-1]

    def _is_of(self, header: str, fingerprint: Fingerprint) -> bool:
        """Return True if a file begun with this line may go on."""
        try:
            begun = json.loads(header)
            return begun == {"schema": SCHEMA, "fingerprint": fingerprint.to_json()}
        except ValueError:
            return False

    def _read(self, lines: list[str]) -> None:
        """Read the points of an earlier measurement."""
        for line in lines:
            try:
                content = json.loads(line)
                if isinstance(content, dict) and content.keys() == {"seconds"}:
                    self.seconds += float(content["seconds"])
                else:
                    self.points.append(Point.from_json(content))
            except (ValueError, TypeError, KeyError):
                continue  # damaged in the middle: that point is measured again
