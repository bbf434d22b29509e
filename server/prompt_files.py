"""Files of prompts for measurements."""

from collections.abc import Sequence
from pathlib import Path

import outrider.profiles
from outrider.drafters.training.prompts import BadLine, read_samples

from .errors import UserError

BUILT_IN = Path(outrider.profiles.__file__).parent / "prompts.jsonl"
"""Code, mathematics and chat in turn, ours."""
SAMPLED = (1.0, 0.7, 0.4)
"""Temperatures of the sampled class. The error of confidences depends on the temperature, and the class has one fit."""


def read_questions(path: Path) -> list[str]:
    """Return the first user turns of a prompts file; raises UserError with file, line and reason."""
    if not path.is_file():
        raise UserError(f"--prompts {path} does not exist")
    try:
        questions = [sample.turns[0] for sample in read_samples(path)]
    except BadLine as error:
        raise UserError(str(error)) from None
    if not questions:
        raise UserError(f"--prompts {path} holds no prompts")
    return questions


def read_mixed_questions(paths: Sequence[Path]) -> list[str]:
    """Return the questions of several files in turn, so that any beginning of the list has as many of each; a shorter
    file begins again. Raises UserError as `read_questions`."""
    files = [read_questions(path) for path in paths]
    longest = max(map(len, files), default=0)
    return [file[i % len(file)] for i in range(longest) for file in files]


def with_temperatures(questions: Sequence[str]) -> list[tuple[str, float]]:
    """Return each question with one of SAMPLED, changing after nine questions: if prompts come in turn, like the
    built-in ones, each kind of prompt gets every temperature, also in both parts of `tune.measure.split`."""
    return [(question, SAMPLED[place // 9 % len(SAMPLED)]) for place, question in enumerate(questions)]
