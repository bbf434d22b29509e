"""`make performance` writes docs/performance.md and README's chart."""

import json
from pathlib import Path
from typing import Any

import performance
import pytest

from outrider.profiles.fingerprint import folder_digest
from outrider.server.settings.checkpoints import WEIGHTS

MOST_WORDS = 2000


def record(question: str, results: Any, drafter: str = "", **more: Any) -> dict[str, Any]:
    return {
        "question": question, "command": f"outrider bench {question} --json profiles/results/a.json --rounds 3",
        "date": "2026-11-24", "versions": {"sglang": "0.5.21"},
        "machine": {"device": "AMD EPYC 9", "cores": 2, "instruction_set": "avx512_bf16"}, "load_average": 2.0,
        "weights": {"target": "0" * 16, "drafter": drafter}, "results": results, **more,
    }  # fmt: skip


def rounds(*rates: float, tau: float = 1.0) -> list[dict[str, Any]]:
    return [{"throughput": rate, "counts": {"tau": tau}} for rate in rates]


def test_the_committed_page_is_made_of_the_committed_records(tmp_path: Path) -> None:
    records = performance.read_all(performance.RESULTS)
    assert {path.name for path in performance.RESULTS.glob("*.json")} == set(records), "records of weights of before"
    assert performance.PAGE.read_text() == performance.page(records), "run `make performance`"
    performance.draw_chart(records, tmp_path / "speed.svg")
    assert performance.CHART.read_text() == (tmp_path / "speed.svg").read_text(), "run `make performance`"
    assert len(performance.PAGE.read_text().split()) <= MOST_WORDS


def test_a_table_a_question_and_a_row_a_machine() -> None:
    arms = {"off": rounds(10, 20), "planned": rounds(15, 20, tau=2.5)}
    one = record("load", {"1": arms}, engine={"model": "M", "drafter": "dspark"})
    page = performance.page({"a.json": one})
    assert page.count("## ") == 1
    assert "| AMD EPYC 9, 2 cores, avx512_bf16 | M | off | 15 | dspark | 1.00 |" in page
    assert "| M | planned | 18 = 1.25 (1.00–1.50) × off | dspark | 2.50 |" in page
    assert "- [a.json](../profiles/results/a.json), 2026-11-24" in page
    other = record(
        "load by URL",
        {"8": {"ours": rounds(30, 40), "theirs": rounds(10, 20)}},
        memory_mb={"ours": 7.4},
        models={"ours": "M", "theirs": "M.gguf"},
    )
    page = performance.page({"a.json": one, "b.json": other})
    assert "| M | ours | 35 | 7 |" in page
    assert "| M | theirs | 15 = 0.42 (0.33–0.50) × ours | – |" in page


def test_a_bar_an_engine(tmp_path: Path) -> None:
    arms = {"ours": rounds(301, 303, 999), "plain": rounds(205), "llama.cpp": rounds(107), "unknown": rounds(403)}
    models = {"ours": performance.EMBEDDED, "llama.cpp": "M.gguf"}
    served = record("load by URL", {"1": arms, "8": arms}, models=models)
    alone = record("load by URL", {"1": {"ours": rounds(555)}}, models={"ours": performance.EMBEDDED})
    performance.draw_chart({"a.json": served, "b.json": alone}, tmp_path / "speed.svg")
    drawn = (tmp_path / "speed.svg").read_text()
    assert all(drawn.count(f">{number}<") == 2 for number in (303, 205, 107))
    assert all(f">{word}<" in drawn for word in ("Outrider", "without speculation", "llama.cpp", "8 in flight"))
    assert "403" not in drawn
    assert "555" not in drawn


def test_parts_of_a_question_are_one_row() -> None:
    engine = {"model": "M", "drafter": "dspark"}
    parts = [record("load", {load: {"off": rounds(9), "planned": rounds(18)}}, engine=engine) for load in ("1", "32")]
    page = performance.page({"a.json": parts[0], "b.json": parts[1]})
    assert "| model | arm | 1 in flight | 32 in flight | drafter | tau |" in page
    assert page.count("| planned |") == 1
    parts = [record("learn", {"held_out": [name]}, engine=engine) for name in ("invoices", "sql")]
    assert len(performance.merged(parts)) == 2, "other prompts are another question"
    parts = [record("load by URL", {"1": {"ours": rounds(9)}}, models={"ours": name}) for name in ("M", "N")]
    assert len(performance.merged(parts)) == 2, "another model is another row"


def test_records_of_other_weights_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    today = folder_digest(next(WEIGHTS.glob("*/*/config.json")).parent)
    for name, digest in (("today", today), ("none", ""), ("before", "f" * 16)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record("load", {}, digest)))
    assert set(performance.read_all(tmp_path)) == {"today.json", "none.json"}
    assert "before.json is left out: drafter had other weights" in capsys.readouterr().err


def test_short_and_long_prompts_at_once() -> None:
    def mixed(gap: float, throughput: float) -> dict[str, Any]:
        rates = {"throughput": throughput, "with_prompts": 9 * throughput, "level_kept": 0.98, "good": None}
        return {"gap": {"p99": gap, "largest": 2 * gap}, **rates}

    asked = [{"output_tokens": {"mean": 96}, "input_tokens": {"mean": None, "min": 50, "max": 6000}, "prompts": []}]
    one = record(
        "load by URL",
        {"8": {"before": [mixed(0.4, 100)], "after": [mixed(0.1, 99)]}},
        scenario={"requests": asked, "arrivals": {"kind": "closed"}},
        models={"before": "m", "after": "m"},
    )
    page = performance.page({"a.json": one | {"question": performance._question(one)}})
    over_first = "99 = 0.99 (0.99–0.99) × before | 891 = 0.99 (0.99–0.99) × before"
    assert f"| m | 8 | after | 100 | 200 | {over_first} | 98% | – |" in page
