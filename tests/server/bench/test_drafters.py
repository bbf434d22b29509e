"""`outrider bench drafters` on the answers of a tiny target."""

import json
from pathlib import Path

import pytest
from records import read_record
from tiny_drafters import DFLASH, DIFFUSION, TINY, make_diffusion, make_model, save_target

from outrider.drafters.block.checkpoint import save_compact
from outrider.server.cli.main import main

DRAFTERS = ("dspark", "dflash", "diffusion, 1 step", "diffusion, 2 steps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    save_target(folder / "target")
    save_compact(make_model(TINY), folder / "dspark")
    save_compact(make_model(DFLASH), folder / "dflash")
    save_compact(make_diffusion(DIFFUSION), folder / "diffusion")
    (folder / "words.jsonl").write_text("".join(json.dumps({"turns": [f"w{i} w{i + 1}"]}) + "\n" for i in range(4)))
    return folder


def bench(folder: Path, *words: str) -> int:
    target = ["--target", str(folder / "target"), "--prompts", str(folder / "words.jsonl"), "--device", "cpu"]
    return main(["bench", "drafters", *words, *target, "--count", "3", "--new-tokens", "12", "--dtype", "float32"])


@pytest.mark.slow
def test_drafters_are_compared_on_the_same_answers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = ["--json", str(tmp_path / "counts.json")]
    drafters = [str(folder / name) for name in ("dspark", "dflash", "diffusion")]
    assert bench(folder, *drafters, "--answers", str(tmp_path / "answers"), *outputs) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| d")]
    counts = read_record(tmp_path / "counts.json")["results"]
    names = [f"{drafter}, words, T={temperature}" for temperature in (0, 1) for drafter in DRAFTERS]
    assert list(counts) == names
    for line, (name, drafted) in zip(table, counts.items(), strict=True):
        assert line.startswith(f"| {name} | {drafted['tau']:.2f} |")
        assert 1 <= drafted["tau"] <= 5
        assert len(drafted["tried"]) == 4
        assert all(kept <= tried for kept, tried in zip(drafted["kept"], drafted["tried"], strict=True))
    assert len(list((tmp_path / "answers").iterdir())) == 2
    assert bench(folder, *drafters, "--answers", str(tmp_path / "answers"), "--anchors", "all", *outputs) == 0
    everywhere = read_record(tmp_path / "counts.json")["results"]
    for name, drafted in everywhere.items():
        assert drafted["tried"][0] == everywhere[f"dspark, words, {name[-3:]}"]["tried"][0] >= counts[name]["tried"][0]
    assert main(["simulate", "--acceptance", str(tmp_path / "counts.json"), "--concurrency", "1", "--steps", "10"]) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere"], "nowhere"),
        (["target"], "drafter architecture ['LlamaForCausalLM'] is unknown"),
        (["dspark", "--temperatures", "-1"], "--temperatures are at least 0, not -1"),
        (["dspark", "--count", "0"], "--count is at least 1, not 0"),
        (["dspark", "--prompts", "/nowhere.jsonl"], "--prompts /nowhere.jsonl does not exist"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    fixed = ["--target", "target", "--device", "cpu", "--new-tokens", "4"]
    given = fixed if "--prompts" in words else [*fixed, "--prompts", "words.jsonl"]
    assert main(["bench", "drafters", *words, *given]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("outrider: ")]
    assert reason in line
