"""Shared parts of benchmarks: numbers from flags, requests in flight, arms that take turns, ratios, output files."""

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from .. import pictures
from ..errors import UserError
from ..settings.flags import Flags

T = TypeVar("T")
Answer = TypeVar("Answer")
Case = TypeVar("Case")
Arm = TypeVar("Arm")

PROMPTS_HELP = 'one JSON object a line, with "prompt" or "turns": [user turns], of which the first is asked'


def positive_integers(flag: str, text: str) -> list[int]:
    """The integers of a list like "1,8"; raises UserError if it is empty or one is not above 0."""
    return _numbers(text, int, 1, f"{flag} is a list of positive numbers like 1,8, not {text!r}")


def numbers_from_zero(flag: str, text: str) -> list[float]:
    """The numbers of a list like "0,0.7"; raises UserError if it is empty or one is below 0."""
    return _numbers(text, float, 0, f"{flag} is a list like 0,1 of numbers that are not negative, not {text!r}")


def length_range(flag: str, text: str) -> tuple[int, int]:
    """Least and most tokens of "128" or "64-192"; raises UserError for other text."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"{flag} is a positive number of tokens, or the least and the most like 64-192, not {text!r}")
    return least, most


def _numbers(text: str, convert: Callable[[str], T], least: float, reason: str) -> list[T]:
    try:
        found = [convert(part) for part in text.split(",") if part]
    except ValueError:
        found = []
    if not found or not min(found) >= least:  # type: ignore[type-var, operator]
        raise UserError(reason)
    return found


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UserError if one of these flags is below 1."""
    for name in names:
        if (value := getattr(args, name)) < 1:
            raise UserError(f"--{name.replace('_', '-')} is at least 1, not {value}")


def add_output_flags(parser: Flags, *, json: str = "every measurement", plot: str = "") -> None:
    """Add --json and, if the picture is described, --plot."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write {json} there as well")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw a picture there: {plot}")


def check_outputs(args: argparse.Namespace) -> None:
    """Raise UserError before a long measurement if its files could not be written."""
    plot = getattr(args, "plot", None)
    for flag, path in (("--json", args.json), ("--csv", getattr(args, "csv", None)), ("--plot", plot)):
        if path and not path.absolute().parent.is_dir():
            raise UserError(f"{flag} {path}: the folder {path.parent} does not exist")
    if plot:
        pictures.require("--plot")


def log(line: str) -> None:
    """Print a line for people, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def rotated(items: Sequence[T], number: int) -> list[T]:
    """The items in cyclic order from item `number`; `number` may exceed their count."""
    start = number % len(items)
    return [*items[start:], *items[:start]]


def alternate_arms(rounds: int, cases: Sequence[Case], arms: Sequence[Arm]) -> Iterator[tuple[int, Case, Arm]]:
    """(round, case, arm) of each measurement, with a progress bar: the arms take turns at every case of every round.

    So other load on the machine affects all arms. Each round begins with another arm, since an arm may change the
    machine's state for the next one.
    """
    from tqdm import tqdm

    with tqdm(total=rounds * len(cases) * len(arms), unit="turn") as progress:
        for number in range(rounds):
            for case in cases:
                for arm in rotated(arms, number):
                    progress.set_postfix_str(f"{arm} at {case}")
                    yield number, case, arm
                    progress.update()


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Background load: `count` processes compute without a pause inside the context, and end with this process."""
    work = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
    started = [subprocess.Popen([sys.executable, "-S", "-c", work]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


async def closed_loop(
    ask: Callable[[T], Awaitable[Answer]], items: Iterable[T], concurrency: int
) -> tuple[list[Answer], float]:
    """The answers to all items in their order, and their total wall time in seconds.

    A closed loop keeps `concurrency` requests in flight: as one ends, the next begins.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(item: T) -> Answer:
        async with slots:
            return await ask(item)

    start = time.perf_counter()
    answers = await asyncio.gather(*map(one, items))
    return answers, time.perf_counter() - start


class Ratio(NamedTuple):
    """Ratio of one arm to another over all rounds."""

    median: float
    least: float
    largest: float

    @property
    def spread(self) -> str:
        return f"{self.least:.2f}–{self.largest:.2f}"

    @property
    def cell(self) -> str:
        """The ratio as text for a table."""
        return f"{self.median:.2f} ({self.spread})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ratio of `ours` over `theirs`, round by round, since other load slows both arms of a round."""
    found = [a / b if b else float("inf") for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(found), min(found), max(found))
