"""Prompt and answer files: one JSON object a line, checked line by line.

A line holds `turns` (list of strings: user, assistant, user, …) or `prompt` (a string). A line that also holds
`response_ids` is an answer of the target and is used as it is.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class BadLine(ValueError):
    """A line of a data file that cannot be used; the message has file, line number and reason."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt, and the target's answer where it is known."""

    turns: tuple[str, ...]
    source: str = ""
    temperature: float = 0.0
    response_ids: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return one line of an answers file."""
        return json.dumps(asdict(self), ensure_ascii=False)


def parse_line(text: str, where: str) -> AnsweredPrompt:
    """Parse one line; `where` (file:line) goes into the error message."""
    try:
        row: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadLine(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise BadLine(f"{where}: expected a JSON object, got {type(row).__name__}")
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise BadLine(f"{where}: expected `turns`, a list of non-empty strings, or `prompt`, a string")
    ids = row.get("response_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise BadLine(f"{where}: `response_ids` must be a list of token ids")
    temperature = row.get("temperature", 0.0)
    if not isinstance(temperature, int | float) or temperature < 0:
        raise BadLine(f"{where}: `temperature` must be a number of at least 0, got {temperature!r}")
    return AnsweredPrompt(
        turns=tuple(turns), source=str(row.get("source", "")), temperature=float(temperature), response_ids=tuple(ids)
    )


def read_samples(path: str | Path) -> Iterator[AnsweredPrompt]:
    """Yield all samples of a JSONL file; skip blank lines, raise `BadLine` at the first bad one."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"prompts file {path} does not exist")
    with path.open(encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            if text.strip():
                yield parse_line(text, f"{path}:{number}")
