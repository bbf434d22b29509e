"""Files of prompts, mixed."""

import json
from pathlib import Path

from refusals import refuses

from outrider.server.prompt_files import read_mixed_questions


def prompts(path: Path, *questions: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    return path


def test_files_take_turns_and_a_short_one_begins_again(tmp_path):
    code, chat = prompts(tmp_path / "code", "a", "b", "c"), prompts(tmp_path / "chat", "x")
    assert read_mixed_questions([code, chat]) == ["a", "x", "b", "x", "c", "x"]
    assert read_mixed_questions([chat]) == ["x"]
    refuses("missing does not exist", read_mixed_questions, [code, tmp_path / "missing"])
