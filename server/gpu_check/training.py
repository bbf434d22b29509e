"""Part T: drafters and a block-diffusion model trained for the embedded model from its own answers, on this device.

Answers and runs are kept in the cache and gone on with; weights as they are shipped go to OUT after every call.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..model import target
from .commands import PROMPTS, Commands, NotReached
from .report import Measured

CHECKPOINT_BYTES = 16 << 20
RESERVE = 30.0
"""Seconds behind a run's minutes, in which it validates and saves."""
ANSWERS = ("--self-prompts", "6000", "--batch", "256", "--sequences", "16")
FEW = ("--self-prompts", "0", "--batch", "8", "--answer-tokens", "24", "--validation", "2")
FEW_PROMPTS = 6
FEW_STEPS = 2


@dataclass(frozen=True, slots=True)
class Training:
    """result: of a run's folder, what is its checkpoint. steps: of its last stage. tiny: flags to try it. others: that
    share the part's time behind this one."""

    kind: str
    result: str
    steps: int
    flags: tuple[str, ...]
    tiny: tuple[str, ...]
    others: int

    def __call__(self, commands: Commands) -> Iterator[Measured]:
        folder, minutes = commands.folder / self.kind, (commands.seconds / (1 + self.others) - RESERVE) / 60
        flags = (
            (*FEW, "--steps", str(FEW_STEPS), *self.tiny) if commands.tiny else (*ANSWERS, "--steps", str(self.steps))
        )
        prompts = few(commands) if commands.tiny else PROMPTS
        commands.outrider(
            f"train-{self.kind}", "train", self.kind, "--target", target.plain_folder(None), "--prompts", prompts,
            "--out", folder, "--data", commands.folder / "data", "--device", commands.device.on.type,
            "--minutes", f"{max(0.1, minutes):.2f}", *self.flags, *flags,
        )  # fmt: skip
        made = folder / self.result
        facts = json.loads((made / "training.json").read_text()) if made.is_dir() else {"steps": 0, "seconds": 0}
        yield Measured("steps", facts["steps"], f"in {facts['seconds']} s")
        if made.is_dir():
            copied = Path(shutil.copytree(made, commands.out / self.kind, dirs_exist_ok=True))
            size = max(path.stat().st_size for path in copied.iterdir())
            yield Measured("largest file", size, f"bytes, in {copied}", at_most=CHECKPOINT_BYTES)
            yield from _measures(folder)
        if facts["steps"] < (FEW_STEPS if commands.tiny else self.steps):
            raise NotReached


def _measures(folder: Path) -> Iterator[Measured]:
    """The last validation of each of a run's stages."""
    for losses in sorted(folder.rglob("losses.csv")):
        header, *rows = (line.split(",") for line in losses.read_text(encoding="utf-8").splitlines())
        for name in ("tau", "agreement"):
            if name in header and (found := [row for row in rows if row[header.index(name)]]):
                what = f"{name}, {losses.parent.name}, step {found[-1][0]}"
                yield Measured(what, float(found[-1][header.index(name)]), "on held-out answers")


def few(commands: Commands) -> Path:
    """A file of some of the prompts."""
    path = commands.folder / "few.jsonl"
    commands.folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)[:FEW_PROMPTS]))
    return path


dspark = Training("dspark", "drafter", 20_000, (), ("--draft-layers", "1"), others=2)
deer = Training("deer", "drafter", 5_000, ("--refine-steps", "5000"), ("--refine-steps", "2"), others=1)
dllm = Training("dllm", "delta", 20_000, ("--decay-steps", "0", "--ema", "0.99"), (), others=0)
RUNS: tuple[Callable[[Commands], Iterator[Measured]], ...] = (dspark, deer, dllm)
