"""scores.py: lm-eval's results, question by question."""

import json
from pathlib import Path

import pytest
import scores
import script
from records import read_record


def write(folder: Path, task: str, answers: dict[int, tuple[str, float]], date: str = "2026-11-25T10-00-00.1") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"doc_id": i, "resps": [[text]], "metrics": ["exact_match"], "exact_match": right})
        for i, (text, right) in answers.items()
    ]
    (folder / f"samples_{task}_{date}.jsonl").write_text("\n".join(lines) + "\n")


def test_questions_are_paired_by_their_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "a" / "model", tmp_path / "b" / "model"
    write(ours, "gsm8k", {0: ("1", 1.0), 1: ("2", 0.0), 2: ("3", 1.0), 3: ("4", 0.0)})
    write(theirs, "gsm8k", {2: ("9", 0.0), 1: ("5", 1.0), 0: ("1", 1.0), 7: ("x", 1.0)})
    write(theirs, "gsm8k", {0: ("old", 0.0)}, date="2026-11-24T10-00-00.1")
    write(ours, "only_here", {0: ("1", 1.0), 1: ("1", 1.0)})
    written = tmp_path / "scores.json"
    folders = [f"ours={tmp_path / 'a'}", f"theirs={tmp_path / 'b'}"]
    assert script.main(scores, [*folders, "--json", str(written)]) == 0
    results = read_record(written)["results"]
    assert list(results) == ["gsm8k"]
    assert results["gsm8k"]["ours"] == {
        "questions": 3, "score": pytest.approx(2 / 3), "error": pytest.approx(1 / 3), "won": 0, "lost": 0, "same": 1,
    }  # fmt: skip
    assert results["gsm8k"]["theirs"] == {
        "questions": 3, "score": pytest.approx(2 / 3), "error": pytest.approx(1 / 3), "won": 1, "lost": 1,
        "same": pytest.approx(1 / 3),
    }  # fmt: skip
    assert "66.67%" in capsys.readouterr().out


def test_files_that_are_no_results_of_lm_eval_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "samples_gsm8k_2026-11-25T10.jsonl").write_text('{"doc_id": 1}\n')
    assert script.main(scores, [f"a={tmp_path}"]) == 1
    assert "holds no samples of lm-eval" in capsys.readouterr().err
    assert script.main(scores, ["nothing"]) == 1
    assert "give each server as NAME=FOLDER" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert script.main(scores, [f"a={tmp_path / 'empty'}"]) == 1
    assert "have no task in common" in capsys.readouterr().err
