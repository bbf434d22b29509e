"""Learners of several owners take turns in one process: the one with most new answers first."""

import argparse
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ..training.target import TargetModel
from . import learner, owners
from .answers import ADAPTERS, KEYS, clear, segment_numbers, segment_path
from .gate import Patience
from .learner import Forgotten, Learner
from .progress import LearnerProgress

TURN_GATES = 3
"""Gates of a turn while another learner has work to do."""


@dataclass
class Turn:
    """A learner's last turn. ends: bytes of each segment of answers that it has read. waits: it ran out of work.
    number: of the turn; 0: it had none."""

    patience: Patience = field(default_factory=Patience)
    ends: dict[int, int] = field(default_factory=dict)
    waits: bool = False
    number: int = 0


class Turns:
    """Lets the learners in `args.folder` learn, one at a time: one is in memory. args.per: "key" or "adapter".

    A turn lasts until the learner waits for answers, or for some gates while another learner has work to do. Most
    learners keep only answers and drafters on disk. Features, which the target can read again, and unfinished runs are
    kept for the last `args.keys` turns.
    """

    def __init__(self, args: argparse.Namespace, target: TargetModel) -> None:
        self.args, self.target, self.folder = args, target, Path(args.folder)
        self.turns: dict[tuple[str, int], Turn] = {}
        self._number = 0

    def run(self) -> NoReturn:
        """Learn for ever. Raises OSError."""
        (self.folder / "features").mkdir(mode=0o700, exist_ok=True)
        while True:
            if (folder := self.next()) is None:
                time.sleep(learner.PAUSE)
            else:
                self.take(folder)
                self.prune()

    def _turn(self, folder: Path) -> Turn:
        """Return the last turn of a learner; a fresh one if its data was forgotten."""
        try:
            made = (folder / "answers").stat().st_ino
        except FileNotFoundError:
            made = 0
        return self.turns.setdefault((folder.name, made), Turn())

    def learners(self) -> list[Path]:
        """Return the folders of all keys' learners, or of the learners of the model and its adapters."""
        if self.args.per == "key":
            return owners.learners(self.folder, KEYS)
        known = [folder for folder in owners.learners(self.folder, ADAPTERS) if owners.owner_of(folder)]
        return [self.folder, *known]

    def next(self, *, besides: Path | None = None) -> Path | None:
        """Return the learner with most new answers, else the unfinished one with the oldest turn, else None."""
        candidates = []
        for folder in self.learners():
            turn = self._turn(folder)
            new = sum(max(0, size - turn.ends.get(number, 0)) for number, size in sizes(folder).items())  # bytes
            if folder != besides and (new or (not turn.waits and turn.number)):
                candidates.append((new, -turn.number, folder.name, folder))
        return max(candidates)[-1] if candidates else None

    def take(self, folder: Path) -> None:
        turn, self._number = self._turn(folder), self._number + 1
        turn.number, gates = self._number, 0

        def turn_over() -> bool:
            nonlocal gates
            gates += 1
            return gates >= TURN_GATES and self.next(besides=folder) is not None

        share = self.args.most_feature_bytes // self.args.keys
        args = argparse.Namespace(**{**vars(self.args), "folder": folder, "most_feature_bytes": share})
        try:
            # Keys share the model's general answers; each adapter has its own.
            general = self.folder / "features" / "general" if self.args.per == "key" else None
            with self.target.adapted(owners.adapter_of(owners.owner_of(folder))):
                learner = Learner(args, self.target, general=general, patience=turn.patience, turn_over=turn_over)
                learner.run()
        except Forgotten:
            clear(folder)
        except FileNotFoundError:
            if folder.exists():
                raise
        except ValueError as error:  # damaged files of one owner do not stop the rest
            turn.waits, turn.ends = True, sizes(folder)
            progress = LearnerProgress(folder)
            progress.numbers.error = " ".join(str(error).split())
            progress.phase("failed")
        else:
            turn.waits, turn.ends = learner.waits, dict(learner.reader.ends)

    def prune(self) -> None:
        """Delete the features and runs of all but the last learners that had a turn."""
        kept = [folder for folder in self.learners() if (folder / "features").is_dir()]
        kept.sort(key=lambda folder: (self._turn(folder).number, (folder / "features").stat().st_mtime))
        for folder in kept[: -self.args.keys]:
            for name in ("features", "run"):
                shutil.rmtree(folder / name, ignore_errors=True)
            self._turn(folder).waits = True


def sizes(folder: Path) -> dict[int, int]:
    """Return the bytes of each segment of a learner's answers."""
    lengths = {}
    for number in segment_numbers(folder / "answers"):
        path = segment_path(folder / "answers", number)
        lengths[number] = path.stat().st_size if path.exists() else 0
    return lengths
