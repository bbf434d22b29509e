"""Finished answers on disk, in segments of lines. The oldest segment is deleted when there are too many tokens.

A line is `{"prompt_ids": [...], "response_ids": [...], "temperature": 0.7, "ruled": false, "at": unix seconds}`. A
killed writer leaves at most half a last line; readers skip it and the next writer removes it.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from outrider.storage.replacing import replace

SEGMENTS = 16
"""Number of segments; each holds this part of the bound."""
LONGEST = 2048
"""Tokens to keep of a prompt and its answer; longer prompts are dropped."""
FOLDERS = ("answers", "features", "run", "drafters")
KEYS, ADAPTERS = "keys", "adapters"
"""Subfolders of a server's learner, for the learners of single API keys and LoRA adapters."""
NAMED_IN = {KEYS: "key.json", ADAPTERS: "adapter.json"}
"""File in each of them that names the owner."""
CONTENTS = (*FOLDERS, "start", "state.json", "events.jsonl", "learner.json", *NAMED_IN, *NAMED_IN.values())
"""Names in a learner's folder."""
FORGOTTEN = ".{}.forgotten."
"""Prefix of a folder's name during its deletion."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: token ids and temperature. ruled: a grammar, penalties or a bias changed its chances."""

    prompt_ids: list[int]
    response_ids: list[int]
    temperature: float
    ruled: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.response_ids


def kept_part(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[int]:
    """Return the answer, cut to `LONGEST` tokens with its prompt; empty if it is too short to keep."""
    response = list(response_ids[: max(0, LONGEST - len(prompt_ids))])
    return response if len(response) >= 2 and len(prompt_ids) else []


class AnswerStore:
    """Appends finished answers to `folder`/answers, of at most `most_tokens` tokens, prompts included.

    No other process may write to the folder. Raises OSError if it cannot be written.
    """

    def __init__(self, folder: str | Path, most_tokens: int) -> None:
        self.folder, self.most_tokens = Path(folder) / "answers", most_tokens
        self._tokens: dict[int, int] = {}
        self._file = -1
        self._open()

    def append(self, answer: Answer) -> bool:
        """Write one line; False if the answer is too short or its prompt too long. Raises OSError."""
        response = kept_part(answer.prompt_ids, answer.response_ids)
        if not response:
            return False
        row = asdict(answer) | {"response_ids": response, "at": round(time.time(), 3)}
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        if self._file < 0 or not os.fstat(self._file).st_nlink:  # deleted, or not opened
            self._open()
        last = max(self._tokens)
        if self._tokens[last] >= self.most_tokens // SEGMENTS:
            last = self._begin(last + 1)
        if (done := os.write(self._file, line)) < len(line):  # the disk is full
            os.ftruncate(self._file, os.fstat(self._file).st_size - done)
            raise OSError(f"{self.folder}: the disk took {done} of {len(line)} bytes of an answer")
        self._tokens[last] += len(answer.prompt_ids) + len(response)
        while sum(self._tokens.values()) > self.most_tokens and len(self._tokens) > 1:
            oldest = min(self._tokens)
            segment_path(self.folder, oldest).unlink(missing_ok=True)
            del self._tokens[oldest]
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        """Continue the newest segment after its last whole line."""
        for made in (self.folder.parent, self.folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tokens, end = {}, 0
        for number in segment_numbers(self.folder):
            lines, end = whole_lines(segment_path(self.folder, number), 0)
            self._tokens[number] = lines.count(b",") - 2 * lines.count(b"\n")  # a line has two commas more than tokens
        self._begin(max(self._tokens, default=0), end)

    def _begin(self, number: int, end: int = 0) -> int:
        """Append to this segment from now on. end: bytes of its whole lines."""
        self.close()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(segment_path(self.folder, number), flags, 0o600)
        os.ftruncate(self._file, end)
        self._tokens.setdefault(number, 0)
        return number


@dataclass
class AnswerReader:
    """Reads new answers in `folder`/answers; segments may disappear meanwhile.

    ends: bytes read of each segment.
    """

    folder: Path
    ends: dict[int, int] = field(default_factory=dict)

    def read(self) -> list[Answer]:
        """Return the answers since the last call, the oldest first; all answers after a deletion."""
        fresh: list[Answer] = []
        numbers = segment_numbers(self.folder / "answers")
        self.ends = {number: end for number, end in self.ends.items() if number in numbers}
        for number in numbers:
            answers, self.ends[number] = read_lines(
                segment_path(self.folder / "answers", number), self.ends.get(number, 0)
            )
            fresh += answers
        return fresh


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:08}.jsonl"


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the existing segments, ascending."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(name[:8]) for name in os.listdir(folder) if re.fullmatch(r"\d{8}\.jsonl", name))
    return []


def read_lines(path: Path, start: int) -> tuple[list[Answer], int]:
    """Return the answers in the whole lines from byte `start` on, and the end of these lines. Skips malformed lines."""
    lines, end = whole_lines(path, start)
    return [answer for line in lines.splitlines() if (answer := _parse(line))], end


def whole_lines(path: Path, start: int) -> tuple[bytes, int]:
    """Return the whole lines from byte `start` on, and their end."""
    try:
        with path.open("rb") as file:
            start = min(start, os.fstat(file.fileno()).st_size)
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return b"", start
    text = text[: text.rfind(b"\n") + 1]
    return text, start + len(text)


def _parse(line: bytes) -> Answer | None:
    try:
        row = json.loads(line)
        answer = Answer(row["prompt_ids"], row["response_ids"], float(row["temperature"]), bool(row.get("ruled")))
        whole = all(type(token) is int and token >= 0 for token in answer.tokens)
    except (ValueError, KeyError, TypeError):
        return None
    return answer if whole and kept_part(answer.prompt_ids, answer.response_ids) == answer.response_ids else None


def forget(folder: str | Path) -> None:
    """Delete everything kept and learned: answers, features, runs and drafters, including keys' and adapters'.

    A server that uses a learned drafter returns to its first one within seconds. The numbering of drafters continues.
    Raises ValueError before deleting if the folder holds anything that is not a learner's.
    """
    folder = Path(folder)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else set()
    ours = re.compile(rf"({'|'.join(map(re.escape, CONTENTS))})|\.({'|'.join(map(re.escape, CONTENTS))})\..*")
    begun = FORGOTTEN.format("answers")
    known = {"answers", "learner.json", *NAMED_IN, *NAMED_IN.values()}
    made_here = known & names or any(name.startswith(begun) for name in names)
    made_here = made_here or (folder.parent.name in NAMED_IN and "state.json" in names)
    if not made_here or not all(ours.fullmatch(name) and not (folder / name).is_symlink() for name in names):
        raise ValueError(f"{folder} is no learner's folder: expected only {', '.join(CONTENTS)}")
    sweep(folder)
    for kind in NAMED_IN:
        for learner in folder.glob(f"{kind}/[!.]*"):
            forget(learner)
    last = max(candidate_names(folder), default=None)
    for name in names:
        if any(name.startswith(FORGOTTEN.format(part)) for part in FOLDERS):  # left by a killed process
            shutil.rmtree(folder / name, ignore_errors=True)
    clear(folder, "answers")
    ServerState(None, (last,) if last else ()).write(folder)


def sweep(folder: Path) -> None:
    """Finish interrupted deletions of single keys' learners."""
    for path in folder.glob(f"{KEYS}/{FORGOTTEN.format('*')}"):
        shutil.rmtree(path, ignore_errors=True)


def clear(folder: Path, *more: str) -> None:
    """Delete everything learned, and further folders."""
    for name in (*more, "features", "run", "drafters"):
        aside = folder / f"{FORGOTTEN.format(name)}{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            (folder / name).rename(aside)  # other processes may add to it
            shutil.rmtree(aside)
    for name in ("events.jsonl", "learner.json"):
        (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class ServerState:
    """The server's decisions on candidates. in_use: name; None: the drafter of its start. refused: names."""

    in_use: str | None = None
    refused: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read state.json; without it no candidate is in use."""
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        return cls(state["in_use"], tuple(state["refused"]))

    def write(self, folder: Path) -> None:
        """Replace state.json as a whole. Raises OSError."""
        replace({folder / "state.json": json.dumps(asdict(self))}, 0o600)


def candidate_names(folder: Path) -> list[str]:
    """Return all known names of present and past candidates."""
    state = ServerState.read(folder)
    there = os.listdir(folder / "drafters") if (folder / "drafters").is_dir() else []
    return sorted(name for name in {*there, *state.refused, state.in_use} if name and name.isdigit())
