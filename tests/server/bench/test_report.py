"""`outrider bench report` writes docs/performance.md and README's chart."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.profiles.fingerprint import folder_digest
from outrider.server.bench import report
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
    records = report.read_all(report.RESULTS)
    assert {path.name for path in report.RESULTS.glob("*.json")} == set(records), "records of weights of before"
    assert report.PAGE.read_text() == report.page(records), "run `make performance`"
    report.draw_chart(records, tmp_path / "speed.svg")
    assert report.CHART.read_text() == (tmp_path / "speed.svg").read_text(), "run `make performance`"
    assert len(report.PAGE.read_text().split()) <= MOST_WORDS


def test_a_table_a_question_and_a_row_a_machine() -> None:
    arms = {"off": rounds(10, 20), "planned": rounds(15, 20, tau=2.5)}
    one = record("load", {"1": arms}, engine={"model": "M", "drafter": "dspark"})
    page = report.page({"a.json": one})
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
    page = report.page({"a.json": one, "b.json": other})
    assert "| M | ours | 35 | 7 |" in page
    assert "| M | theirs | 15 = 0.42 (0.33–0.50) × ours | – |" in page


def test_a_bar_an_engine(tmp_path: Path) -> None:
    arms = {"ours": rounds(301, 303, 999), "plain": rounds(205), "llama.cpp": rounds(107), "unknown": rounds(403)}
    models = {"ours": report.EMBEDDED, "llama.cpp": "M.gguf"}
    served = record("load by URL", {"1": arms, "8": arms}, models=models)
    alone = record("load by URL", {"1": {"ours": rounds(555)}}, models={"ours": report.EMBEDDED})
    report.draw_chart({"a.json": served, "b.json": alone}, tmp_path / "speed.svg")
    drawn = (tmp_path / "speed.svg").read_text()
    assert all(drawn.count(f">{number}<") == 2 for number in (303, 205, 107))
    assert all(f">{word}<" in drawn for word in ("Outrider", "without speculation", "llama.cpp", "8 in flight"))
    assert "403" not in drawn
    assert "555" not in drawn


def test_answers_of_one_token_are_times_of_prompts(tmp_path) -> None:
    def first_token(*seconds: float) -> list[dict[str, Any]]:
        return [{"throughput": 1 / time, "ttft": {"p50": time}} for time in seconds]

    for tokens, times in ((512, (0.8, 1.0)), (4096, (8.0, 8.0))):
        asked = {"input_tokens": {"mean": tokens}, "output_tokens": {"mean": 1.0}}
        arms = {"ours": first_token(*times), "theirs": first_token(2.4, 2.0)}
        one = record("load by URL", {"1": arms}, scenario={"requests": [asked]}, models={"ours": "M"})
        (tmp_path / f"{tokens}.json").write_text(json.dumps(one))
    records = report.read_all(tmp_path)
    page = report.page(records)
    assert "| model | tokens | arm | 1 in flight |" in page
    assert "| M | 512 | ours | 0.90 |" in page
    assert "| M | 512 | theirs | 2.20 = 2.50 (2.00–3.00) × ours |" in page
    assert "| M | 4096 | ours | 8.00 |" in page


def test_learning_is_compared_by_means_of_rounds() -> None:
    def turns(*rates: float) -> list[dict[str, Any]]:
        return [{"throughput": r, "gap": {"p99": 1 / r}, "processor_ms": 5.0} for r in rates]

    arms = {"off": turns(10, 10, 20), "learn": turns(9, 10, 22), "again": turns(10, 10, 20)}
    asked = {"prompts": ["prompts/invoices.jsonl"], "output_tokens": {"mean": 96}}
    one = record("load by URL", {"8": arms}, learning=["learn"], scenario={"requests": [asked]})
    page = report.page({"a.json": one | {"question": report._question(one)}})
    assert "| prompts | in flight | over off | rounds | tokens/s | p99 gap | processor time a token |" in page
    assert "| invoices | 8 | learn | 3 | 1.000 ± 0.058 | 1.007 ± 0.058 | 1.000 ± 0.000 |" in page
    assert "| invoices | 8 | again | 3 | 1.000 ± 0.000 |" in page


def test_rounding_and_scores_have_a_row_an_arm() -> None:
    rounding = {"answers": 2, "tokens": 9, "kl": 0.00449, "kl_error": 0.0004, "kl_p99": 0.03, "same": 0.966}
    groups = {"greedy": rounding | {"kl": 0.0034}, "all": rounding}
    one = record("quality", {"int8": groups}, engine={"model": "M"}, first="float")
    page = report.page({"a.json": one})
    assert "| model | arm | tokens | greedy | all | 99th percentile | same |" in page
    assert "| M | int8 beside float | 9 | 0.0034 ± 0.0004 | 0.0045 ± 0.0004 | 0.030 | 96.6% |" in page
    score = {"questions": 200, "score": 0.05, "error": 0.015, "won": 0, "lost": 0, "same": 1.0}
    servers = {"float": score, "int8": score | {"score": 0.055, "won": 3, "lost": 2, "same": 0.42}}
    page = report.page({"a.json": record("scores", {"gsm8k": servers})})
    assert "| task | questions | float | int8 |" in page
    assert "| gsm8k | 200 | 5.0% ± 1.5% | 5.5% ± 1.5%; 3, 2 |" in page


def test_parts_of_a_question_are_one_row() -> None:
    engine = {"model": "M", "drafter": "dspark"}
    parts = [record("load", {load: {"off": rounds(9), "planned": rounds(18)}}, engine=engine) for load in ("1", "32")]
    page = report.page({"a.json": parts[0], "b.json": parts[1]})
    assert "| model | arm | 1 in flight | 32 in flight | drafter | tau |" in page
    assert page.count("| planned |") == 1
    parts = [record("learn", {"held_out": [name]}, engine=engine) for name in ("invoices", "sql")]
    assert len(report.merged(parts)) == 2, "other prompts are another question"
    parts = [record("load by URL", {"1": {"ours": rounds(9)}}, models={"ours": name}) for name in ("M", "N")]
    assert len(report.merged(parts)) == 2, "another model is another row"


def test_records_of_other_weights_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    today = folder_digest(next(WEIGHTS.glob("*/*/config.json")).parent)
    for name, digest in (("today", today), ("none", ""), ("before", "f" * 16)):
        (tmp_path / f"{name}.json").write_text(json.dumps(record("load", {}, digest)))
    assert set(report.read_all(tmp_path)) == {"today.json", "none.json"}
    assert "before.json is left out: drafter had other weights" in capsys.readouterr().err


def test_records_of_trained_drafters_stay_whatever_is_shipped(tmp_path: Path) -> None:
    counts = {"tau": 2.25, "tried": [100, 50], "kept": [50, 0]}
    results = {f"dflash, 1 step, chat, {temperature}": counts for temperature in ("T=0", "T=1")}
    alike = record("drafters", results, trained={"dflash": {"sequences": 9, "anchors": 960}})
    alike["weights"] = {"dflash": "f" * 16}
    engine = {"model": "M", "drafter": "dflash"}
    served = record("load", {"1": {"off": rounds(9), "planned": rounds(18)}}, drafter="f" * 16, engine=engine)
    for name, one in (("alike", alike), ("served", served)):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    page = report.page(report.read_all(tmp_path))
    assert "| drafter | prompts | answers, anchors | tau, T=0 | tau, T=1 | by position |" in page
    assert "| dflash, 1 step | chat | 9, 960 | 2.25 | 2.25 | .50 .00 |" in page
    assert "## Throughput, with speculation and without" not in page
    assert "| dflash | 2.00 (2.00–2.00) |" in page


def test_pauses_during_long_prompts() -> None:
    def beside(pause: float, throughput: float) -> dict[str, float]:
        return {"pause": pause, "pace": 0.4, "alone": 5.0, "beside": 8.0, "short": 0.1, "throughput": throughput}

    def mixed(gap: float, throughput: float) -> dict[str, Any]:
        rates = {"throughput": throughput, "with_prompts": 9 * throughput, "level_kept": 0.98, "good": None}
        return {"gap": {"p99": gap, "largest": 2 * gap}, **rates}

    models = {"models": {"before": "m", "after": "m"}}
    arms = {"before": [beside(5.0, 900), beside(5.2, 800)], "after": [beside(0.2, 810), beside(0.2, 800)]}
    page = report.page({"a.json": record("long prompts", {"5000": arms}, **models)})
    assert "| m | 5000 | before | 5.10 | 0.40 | 8.00 | 1.60 | 0.10 | 850 |" in page
    assert "| 5000 | after | 0.20 | 0.40 | 8.00 | 1.60 | 0.10 | 805 = 0.95 (0.90–1.00) × before |" in page
    asked = [{"output_tokens": {"mean": 96}, "input_tokens": {"mean": None, "min": 50, "max": 6000}, "prompts": []}]
    scenario = {"requests": asked, "arrivals": {"kind": "closed"}}
    one = record(
        "load by URL", {"8": {"before": [mixed(0.4, 100)], "after": [mixed(0.1, 99)]}}, scenario=scenario, **models
    )
    page = report.page({"a.json": one | {"question": report._question(one)}})
    assert (
        "| m | 8 | after | 100 | 200 | 99 = 0.99 (0.99–0.99) × before | 891 = 0.99 (0.99–0.99) × before | 98% | – |"
        in page
    )
