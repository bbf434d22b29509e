"""`outrider train` at tiny size: a drafter, a picture of its losses, its dtype."""

import argparse
import json
import sys
from pathlib import Path

import pytest
from tiny_drafters import save_target

from outrider.drafters.commands import train
from outrider.server.cli.main import main
from outrider.server.machine import hardware


@pytest.mark.slow
def test_losses_are_drawn_where_matplotlib_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    save_target(tmp_path / "target")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text("".join(json.dumps({"turns": [f"w{i} w{i + 1}"]}) + "\n" for i in range(8)))
    words = ["train", "dspark", "--target", str(tmp_path / "target"), "--prompts", str(prompts), "--out", str(out)]
    words += ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--answer-tokens", "12", "--gamma", "4"]
    words += ["--steps", "20", "--sequences", "2", "--anchors", "4", "--rank", "4", "--draft-vocab", "0", "--top", "4"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        assert main(words) == 0
    assert "matplotlib is not installed: no losses.png, the numbers are in losses.csv" in capsys.readouterr().out
    assert (out / "losses.csv").is_file()
    assert not (out / "losses.png").exists()
    assert main(words) == 0
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "drafter" / "config.json").is_file()


@pytest.mark.parametrize(
    ("flags", "given", "dtype"),
    [
        ({"avx512_bf16"}, [], "bfloat16"),
        ({"avx2", "avx512f"}, [], "float32"),
        ({"avx2"}, ["--dtype", "bfloat16"], "bfloat16"),
    ],
)
def test_training_multiplies_in_what_the_processor_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: set[str], given: list[str], dtype: str
) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(train, "run", seen.append)
    assert main(["train", "dspark", "--target", "model", "--out", str(tmp_path), "--device", "cpu", *given]) == 0
    assert [args.dtype for args in seen] == [dtype]
