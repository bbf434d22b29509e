"""Logs as training text: every shape gives the served tokens, bad lines are named, training resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafters.learning.answers import Answer
from outrider.drafters.training.features import AnsweredText
from outrider.drafters.training.logs import LogReader, held_out
from outrider.drafters.training.prompts import BadLine
from outrider.drafters.training.store import FeatureStore
from outrider.drafters.training.target import TargetModel
from outrider.server.cli.main import main


@pytest.fixture(scope="module")
def target(learned_target: Path) -> TargetModel:
    return TargetModel.load(str(learned_target), dtype=torch.float32)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def write(log: Path, *rows: Any) -> None:
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts(log: Path, target: TargetModel) -> list[AnsweredText]:
    return list(LogReader(target).read([str(log)]))


QUESTION = {"role": "user", "content": "w3 w4"}
ANSWER = {"role": "assistant", "content": "w7 w8 w9"}


def test_every_shape_gives_the_tokens_that_were_served(log: Path, target: TargetModel) -> None:
    prompt = target.chat_ids(["w3 w4"])
    served = target.tokenizer("w7 w8 w9")["input_ids"] + [target.tokenizer.eos_token_id]
    parts = [{"type": "text", "text": "w3 "}, {"type": "text", "text": "w4"}]
    choice = {"message": ANSWER, "finish_reason": "stop"}
    write(
        log,
        {"prompt_ids": prompt, "response_ids": served, "temperature": 0.5},
        {"messages": [QUESTION, ANSWER], "temperature": 0.5},
        {"messages": [{"role": "user", "content": parts}, ANSWER], "temperature": 0.5},
        {"request": {"messages": [QUESTION], "temperature": 0.5}, "response": {"choices": [choice, choice]}},
    )
    answers = texts(log, target)
    assert len(answers) == 5
    assert set(map(repr, answers)) == {repr(answers[0])}
    assert (answers[0].tokens, answers[0].prompt, answers[0].temperature) == (prompt + served, len(prompt), 0.5)
    write(
        log,
        {"request": {"prompt": "w3 w4"}, "response": {"choices": [{"text": "w7 w8 w9", "finish_reason": "length"}]}},
        {"prompt": "w3 w4", "completion": "w7 w8 w9"},
    )
    cut, ended = texts(log, target)
    assert ended.tokens == target.tokenizer("w3 w4")["input_ids"] + served
    assert cut.tokens == ended.tokens[:-1]


def test_entries_without_text_are_counted(log: Path, target: TargetModel) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    write(log, {"messages": [picture, ANSWER]}, {"messages": [QUESTION, call]}, {"messages": [QUESTION, ANSWER]})
    with log.open("a") as file:
        file.write('\n{"messages": [')  # an empty line, and an unfinished one
    reader = LogReader(target)
    assert len(list(reader.read([str(log)]))) == 1
    assert dict(reader.skipped) == {"images, sound or tool calls": 1, "no text": 1, "half a last line": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object, got list"),
        ("{}", "expected `messages`, `request` with `response`"),
        ('{"prompt": "w1"}', "expected `messages`, `request` with `response`"),
        ('{"messages": "hello"}', "`messages` must be a list of objects"),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', "no question before its answer"),
        ('{"messages": [{"role": "user", "content": "w1"}, {"role": "user", "content": "w2"}]}', "is by 'user'"),
        ('{"request": {"prompt": "w1"}, "response": {"error": "x"}}', "must be an object with a list of `choices`"),
        ('{"request": 3, "response": {}}', "`request` must be an object"),
        ('{"prompt_ids": [1], "response_ids": [2, 960]}', "the target's token ids, below 96"),
        ('{"prompt": "w1", "completion": "w2", "temperature": "hot"}', "`temperature` must be a number"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(log: Path, target: TargetModel, line: str, message: str) -> None:
    write(log, {"messages": [QUESTION, ANSWER]})
    with log.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BadLine, match=f"log.jsonl:2: .*{message}"):
        texts(log, target)


def command(target: Path, log: Path, out: Path, steps: int) -> list[str]:
    words = ["train", "dspark", "--target", str(target), "--from-log", str(log), "--out", str(out), "--device", "cpu"]
    words += ["--dtype", "float32", "--threads", "1", "--gamma", "4", "--sequences", "2", "--anchors", "4"]
    return [*words, "--rank", "4", "--draft-vocab", "0", "--top", "8", "--steps", str(steps)]


def test_a_drafter_is_trained_from_a_log_without_writing_answers(
    learned_target: Path, answers: list[Answer], log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Held-out prompts stay held out, foreign answers are ignored, new answers are added."""
    rows = [
        {"prompt_ids": answer.prompt_ids, "response_ids": answer.response_ids, "temperature": 0} for answer in answers
    ]
    foreign = [{**row, "response_ids": list(reversed(row["response_ids"]))} for row in rows[:3]]
    write(log, *rows[:35], *foreign)
    monkeypatch.setattr("outrider.drafters.commands.train.answer", None)  # writes answers
    out = tmp_path / "run"
    assert main(command(learned_target, log, out, 4)) == 0
    assert "left out of the log: 3 x not this model's answers" in capsys.readouterr().out
    assert (out / "drafter" / "config.json").is_file()
    facts = json.loads((out / "drafter" / "training.json").read_text())
    assert facts["sequences"] == 30
    write(log, *rows)
    assert main(command(learned_target, log, out, 8)) == 0
    assert "resuming" in capsys.readouterr().out
    meta = json.loads((out / "features" / "meta.json").read_text())
    store = FeatureStore(out / "features", width=meta["width"], top=8, meta={})
    assert len(store) == 46
    assert sum(held_out(entry.source) for entry in store.entries) == 16
    write(log, *foreign)
    assert main(command(learned_target, log, tmp_path / "other", 4)) == 1
    assert "no answer that this model may have written" in capsys.readouterr().err
