"""lm-eval's scores of several servers, answer by answer.

Each folder is the output of `lm-eval run … --log_samples --output_path FOLDER`; if it holds a task twice, the later
counts. Only questions in all folders are compared, each with the first folder's:

  score      mean over the questions, with its standard error
  won, lost  questions that only this server answers correctly; questions that only the first one does
  same       share of answers with the same text

examples:
  python tests/measure/scores.py float=scores/float int8=scores/int8 --json scores.json
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import script

from outrider.server.bench import harness, record
from outrider.server.errors import UserError

SAMPLES = re.compile(r"samples_(.+)_(\d{4}-\d\d-\d\dT.+)\.jsonl")
"""lm-eval's name of a file: task and date."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. right: its score, 0 to 1."""

    text: str
    right: float


@dataclass(frozen=True, slots=True)
class Score:
    """A server's score at one task, compared with the first server's."""

    questions: int
    score: float
    error: float
    won: int
    lost: int
    same: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER", help="a server, and what lm-eval wrote about it")
    harness.add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    harness.check_outputs(args)
    servers = {name: read(Path(folder)) for name, folder in map(_parted, args.folders)}
    found = compare(servers)
    if not found:
        raise UserError("these folders have no task in common: run the same tasks, with --log_samples")
    print(f"{'task':20}{'server':12}{'questions':>10}{'score':>9}{'±':>8}{'won':>6}{'lost':>6}{'same':>9}")
    for task, scores in found.items():
        for name, one in scores.items():
            numbers = f"{one.questions:10}{one.score:9.2%}{one.error:8.2%}{one.won:6}{one.lost:6}{one.same:9.1%}"
            print(f"{task:20}{name:12}{numbers}")
    record.write(args.json, "scores", found)
    return 0


def _parted(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not equals or not name or not Path(folder).is_dir():
        raise UserError(f"give each server as NAME=FOLDER, with a folder that exists, not {text!r}")
    return name, folder


def read(folder: Path) -> dict[str, dict[int, Answered]]:
    """The answers of each task by question; raises UserError for other files."""
    dated = [(found[2], found[1], path) for path in folder.rglob("*.jsonl") if (found := SAMPLES.fullmatch(path.name))]
    tasks: dict[str, dict[int, Answered]] = {}
    for _, task, path in sorted(dated):
        try:
            samples = [json.loads(line) for line in path.read_text().splitlines()]
            tasks[task] = {
                int(one["doc_id"]): Answered(str(one["resps"][0][0]), float(one[one["metrics"][0]])) for one in samples
            }
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(f"{path} holds no samples of lm-eval: {error!r}") from None
    return tasks


def compare(servers: Mapping[str, Mapping[str, Mapping[int, Answered]]]) -> dict[str, dict[str, Score]]:
    """Scores by task and server, over the questions answered by all."""
    first = next(iter(servers.values()))
    found: dict[str, dict[str, Score]] = {}
    for task in first:
        if all(task in tasks for tasks in servers.values()):
            common = set.intersection(*(set(tasks[task]) for tasks in servers.values()))
            if len(common) > 1:
                found[task] = {
                    name: _score([tasks[task][i] for i in common], [first[task][i] for i in common])
                    for name, tasks in servers.items()
                }
    return found


def _score(answers: list[Answered], first: list[Answered]) -> Score:
    right = [one.right for one in answers]
    pairs = list(zip(answers, first, strict=True))
    return Score(
        questions=len(answers),
        score=statistics.mean(right),
        error=statistics.stdev(right) / len(right) ** 0.5,
        won=sum(one.right > other.right for one, other in pairs),
        lost=sum(one.right < other.right for one, other in pairs),
        same=statistics.mean(one.text == other.text for one, other in pairs),
    )


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
