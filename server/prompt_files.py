"""Files of prompts that a measurement asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.drafters.training.prompts import BadLine, read_samples

from .errors import UserError


def read_questions(path: Path) -> list[str]:
    """First user turns of a prompts file; raises UserError with file, line and reason."""
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
    """The questions of several files in turn, so that any beginning of the list has as many of each; a shorter file
    begins again. Raises UserError as `read_questions`."""
    files = [read_questions(path) for path in paths]
    longest = max(map(len, files), default=0)
    return [file[i % len(file)] for i in range(longest) for file in files]
