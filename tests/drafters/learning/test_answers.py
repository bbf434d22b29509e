"""Stored answers: bounded, whole after a kill, split by prompt, forgotten on request."""

import json
import os
import stat
from pathlib import Path

import pytest

from outrider.drafters.learning import answers
from outrider.drafters.learning.answers import (
    LONGEST,
    SEGMENTS,
    Answer,
    AnswerReader,
    AnswerStore,
    candidate_names,
    forget,
)
from outrider.drafters.training.logs import held_out
from outrider.drafters.training.store import digest


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "answers").iterdir())


def test_appended_answers_are_read_once(tmp_path: Path) -> None:
    store, reader = AnswerStore(tmp_path, 10**6), AnswerReader(tmp_path)
    assert reader.read() == []
    assert store.append(Answer([1, 2, 3], [4, 5], 0.7))
    (found,) = reader.read()
    assert (found.prompt_ids, found.response_ids, found.temperature) == ([1, 2, 3], [4, 5], 0.7)
    assert reader.read() == []
    store.append(Answer([9], [8, 7], 0.0))
    assert [answer.tokens for answer in reader.read()] == [[9, 8, 7]]
    assert [len(answer.tokens) for answer in AnswerReader(tmp_path).read()] == [5, 3]
    for path in (tmp_path / "answers", *segments(tmp_path)):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_short_and_long_answers(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, 10**6)
    assert not store.append(Answer([1], [2], 0.0))
    assert not store.append(Answer([], [2, 3], 0.0))
    assert not store.append(Answer([1] * (LONGEST + 1), [2] * 9, 0.0))
    assert not store.append(Answer([1] * (LONGEST - 1), [2] * 9, 0.0))
    assert store.append(Answer([1] * (LONGEST - 2), [2] * 9, 0.0))
    assert [len(answer.tokens) for answer in AnswerReader(tmp_path).read()] == [LONGEST]


def test_the_oldest_segments_go(tmp_path: Path) -> None:
    """The store has at most the bound, and at least the bound less a segment."""
    bound, reader, count = 1600, AnswerReader(tmp_path), 0
    store = AnswerStore(tmp_path, bound)
    for i in range(600):
        if i == 300:
            store.close()
            store = AnswerStore(tmp_path, bound)
        store.append(Answer([i], [1] * 9, 0.0))
        there = [answer.prompt_ids[0] for answer in AnswerReader(tmp_path).read()]
        assert there == list(range(i - len(there) + 1, i + 1))
        assert 10 * len(there) <= bound
        assert 10 * len(there) >= min(10 * (i + 1), bound - bound // SEGMENTS - 10)
        if i % 7 == 0:
            count += len(reader.read())
    assert count + len(reader.read()) == 600


def test_a_store_is_opened_without_parsing_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It still knows each segment's tokens, so the next surplus segment displaces the oldest."""
    store, parsed = AnswerStore(tmp_path, 1600), []
    for i in range(160):
        store.append(Answer([i], [1] * 9, 0.5))
    store.close()
    monkeypatch.setattr(answers, "_parse", parsed.append)
    again, before = AnswerStore(tmp_path, 1600), segments(tmp_path)
    assert not parsed
    again.append(Answer([1], [2, 3], 0.5))
    assert segments(tmp_path)[:-1] == before[1:]


def test_half_a_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, 10**6)
    store.append(Answer([1], [2, 3], 0.0))
    reader = AnswerReader(tmp_path)
    assert len(reader.read()) == 1
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        assert reader.read() == []
        again = AnswerStore(tmp_path, 10**6)
        assert path.read_bytes() == whole
        again.append(Answer([7], [8, 9], 0.0))
        assert [answer.prompt_ids for answer in reader.read()] == [[7]]
        path.write_bytes(whole)
        reader = AnswerReader(tmp_path)
        assert len(reader.read()) == 1


@pytest.mark.parametrize(
    "line",
    [
        "{", "3", "[]", "{}", '{"prompt_ids": [1], "response_ids": [2, "x"], "temperature": 0}',
        '{"prompt_ids": [1], "response_ids": [2, -3], "temperature": 0}',
        '{"prompt_ids": [], "response_ids": [2, 3], "temperature": 0}',
        '{"prompt_ids": 1, "response_ids": [2, 3], "temperature": 0}',
    ],
)  # fmt: skip
def test_lines_that_are_no_answer_are_left_out(tmp_path: Path, line: str) -> None:
    store = AnswerStore(tmp_path, 10**6)
    store.append(Answer([1], [2, 3], 0.0))
    with segments(tmp_path)[0].open("a") as file:
        file.write(line + "\n")
    store.append(Answer([4], [5, 6], 0.0))
    assert [answer.prompt_ids for answer in AnswerReader(tmp_path).read()] == [[1], [4]]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = AnswerStore(tmp_path, 10**6), os.write
    store.append(Answer([1], [2, 3], 0.0))
    monkeypatch.setattr(os, "write", lambda handle, text: write(handle, text[:5]))
    with pytest.raises(OSError, match="the disk took 5 of"):
        store.append(Answer([4], [5, 6], 0.0))
    monkeypatch.setattr(os, "write", write)
    store.append(Answer([7], [8, 9], 0.0))
    assert [answer.prompt_ids for answer in AnswerReader(tmp_path).read()] == [[1], [7]]


def test_one_prompt_in_eight_is_held_out_by_itself_alone() -> None:
    share = sum(held_out(digest([i, i // 3, 5])) for i in range(8000)) / 8000
    assert abs(share - 1 / 8) < 4 * (1 / 8 * 7 / 8 / 8000) ** 0.5
    assert digest([1, 2]) == digest((1, 2)) != digest([2, 1])


def test_forget_deletes_everything_and_the_writer_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "learner"
    store = AnswerStore(folder, 10**6)
    store.append(Answer([1], [2, 3], 0.0))
    for name in ("features/general", "run", "drafters/0004", "drafters/0012"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    for name in ("learner.json", "events.jsonl", ".learner.json.killed"):
        (folder / name).write_text("x")
    (folder / "state.json").write_text(json.dumps({"in_use": "0012", "refused": ["0013"]}))
    forget(folder)
    assert {path.name for path in folder.iterdir()} <= {"state.json", ".learner.json.killed"}
    assert json.loads((folder / "state.json").read_text()) == {"in_use": None, "refused": ["0013"]}
    assert candidate_names(folder) == ["0013"]
    store.append(Answer([4], [5, 6], 0.0))
    assert [answer.prompt_ids for answer in AnswerReader(folder).read()] == [[4]]
    forget(folder)
    assert AnswerReader(folder).read() == []
    (folder / ".answers.forgotten.77").mkdir()
    forget(folder)
    assert {path.name for path in folder.iterdir()} <= {"state.json", ".learner.json.killed"}


@pytest.mark.parametrize("foreign", ["thesis.tex", "answers.jsonl", ".git", "features.zip"])
def test_forget_refuses_foreign_folders(tmp_path: Path, foreign: str) -> None:
    with pytest.raises(ValueError, match="is no learner's folder"):
        forget(tmp_path)
    AnswerStore(tmp_path, 10**6).append(Answer([1], [2, 3], 0.0))
    (tmp_path / foreign).write_text("x")
    with pytest.raises(ValueError, match="is no learner's folder"):
        forget(tmp_path)
    (tmp_path / foreign).unlink()
    (tmp_path / "run").symlink_to(tmp_path.parent)
    with pytest.raises(ValueError, match="is no learner's folder"):
        forget(tmp_path)
    assert len(AnswerReader(tmp_path).read()) == 1


def test_answers_are_kept_again_after_a_segment_could_not_be_begun(tmp_path: Path) -> None:
    """The store was just forgotten, or no file can be opened."""
    store = AnswerStore(tmp_path, 16 * SEGMENTS)
    store.append(Answer([1], [2] * 20, 0.0))
    (tmp_path / "answers").rename(tmp_path / "aside")
    with pytest.raises(OSError, match="No such file"):
        store.append(Answer([1], [3] * 20, 0.0))
    assert store.append(Answer([1], [4] * 20, 0.0))
    assert [answer.response_ids[0] for answer in AnswerReader(tmp_path).read()] == [4]
