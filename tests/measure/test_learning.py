"""learning.py: its requests, counts and report."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import learning
import performance
import pytest
import script
from aiohttp import web
from records import read_record
from small_openai import SmallServer, answer

from outrider.server.prompt_files import read_questions

ROOT = Path(__file__).parents[2]
WORDS = 12


class LearningServer(SmallServer):
    """Decodes one token a step, and three once taught twice."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__(self.answer)
        self.taught, self.changes = 0, changes
        self.live = {"tokens": 0, "request_steps": 0, "learning": self.learning()}

    def learning(self, *exchanges: dict[str, Any]) -> dict[str, Any]:
        learned = bool(exchanges)
        return {
            "answers": self.taught, "held_out": 1, "anchors": 96 * self.taught, "in_use": "0001" if learned else None,
            "exchanges": list(exchanges),
        }  # fmt: skip

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.live["tokens"] += WORDS
        self.live["request_steps"] += WORDS // (3 if self.live["learning"]["in_use"] else 1)
        if body.get("store", True):
            self.taught += 1
            if self.taught == 2:
                self.live["learning"] = self.learning({"at": time.time() + 5, "event": "promotion", "drafter": "0001"})
        changed = self.changes and self.taught
        return await answer(request, body, text=" ".join(["other" if changed else "word"] * WORDS))


def prompts(folder: Path, name: str, count: int) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name} {number}"}) + "\n" for number in range(count)))
    return path


def run(server: LearningServer, folder: Path) -> tuple[int, dict[str, Any]]:
    files = [str(prompts(folder, *each)) for each in (("served", 4), ("held", 3), ("general", 2))]
    with server:
        code = script.main(
            learning,
            [
                *("--url", server.url, "--pauses", "2", "--pause", "0.01", "--probe", "2"),
                *("--prompts", files[0], "--held-out", files[1], "--general", files[2]),
                *("--json", str(folder / "learn.json")),
            ],
        )
    return code, read_record(folder / "learn.json")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LIVE_SECONDS", 0)


def test_held_out_prompts_are_not_stored_and_show_the_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = LearningServer()
    code, written = run(server, tmp_path)
    shown, results = capsys.readouterr().out, written["results"]
    assert code == 0
    kept = [body["messages"][0]["content"] for body in server.asked if body.get("store", True)]
    assert sorted(kept) == [f"served {number}" for number in range(4)]
    assert all(body["temperature"] == 0 for body in server.asked)
    salts = [body.get("cache_salt") for body in server.asked if not body.get("store", True)]
    assert len(set(salts)) == len(salts) > 9  # lookup finds neither another's answers nor its own earlier ones
    assert {name: asked["tau"] for name, asked in results["before"].items()} == {"held": 1.0, "general": 1.0}
    assert {name: asked["tau"] for name, asked in results["after"].items()} == {"held": 3.0, "general": 3.0}
    assert results["before"]["held"]["tokens"] == 3 * WORDS
    assert [(point["served"], point["in_use"]) for point in results["curve"]] == [(2, "0001"), (4, "0001")]
    assert results["curve"][0]["asked"]["held"]["tokens"] == 2 * WORDS
    assert 0 < results["first_promotion_seconds"] <= 5.1
    assert (results["promotions"], results["rollbacks"], results["changed_texts"]) == (1, 0, 0)
    assert "| held | 1.00 | 3.00 | 3.00 |" in shown
    assert "| held | 1.00 → 3.00 = 3.00 × |" in performance.page({"learn.json": written})


def test_a_changed_greedy_text_is_a_fault(tmp_path: Path) -> None:
    code, results = run(LearningServer(changes=True), tmp_path)
    assert code == 1
    assert results["results"]["changed_texts"] == 2 * 2 + 3 + 2


def test_a_server_that_does_not_learn_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, file = LearningServer(), str(prompts(tmp_path, "a", 1))
    del server.live["learning"]
    with server:
        assert script.main(learning, ["--url", server.url, "--prompts", file, "--held-out", file]) == 1
    assert "does not learn: start it with --learn" in capsys.readouterr().err


@pytest.mark.parametrize("domain", ["invoices", "sql", "tickets"])
def test_made_up_prompts_are_the_same_again_and_none_is_served_and_held_out(domain: str, tmp_path: Path) -> None:
    corpora = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        subprocess.run([sys.executable, "tests/measure/domains.py", domain, "--out", str(folder)], cwd=ROOT, check=True)
        files = [folder / f"{domain}.jsonl", folder / f"{domain}-held-out.jsonl"]
        corpora.append([read_questions(file) for file in files])
    assert corpora[0] == corpora[1]
    served, held_out = corpora[0]
    assert (len(served), len(held_out)) == (400, 60)
    assert len({*served, *held_out}) == 460
