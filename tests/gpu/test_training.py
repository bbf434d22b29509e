"""Training on a GPU: every kind for two steps."""

import json
import subprocess
from pathlib import Path

import pytest
from running import OUTRIDER, environment
from safetensors.torch import load_file

import outrider.profiles
from outrider.server.model import target

PROMPTS = Path(outrider.profiles.__file__).with_name("prompts.jsonl")
FEW = ("--self-prompts", "0", "--batch", "8", "--answer-tokens", "24", "--validation", "2", "--steps", "2")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "prompts.jsonl"
    path.write_text("".join(PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)[:6]))
    return path


@pytest.mark.parametrize(
    ("kind", "result", "flags"),
    [
        ("dspark", "drafter", ("--draft-layers", "1")),
        ("dflash2", "drafter", ("--draft-layers", "1")),
        ("deer", "drafter", ("--refine-steps", "2")),
        ("dllm", "delta", ("--decay-steps", "0", "--ema", "0.99")),
    ],
)
def test_two_steps(kind: str, result: str, flags: tuple[str, ...], prompts: Path, tmp_path: Path) -> None:
    command = [OUTRIDER, "train", kind, "--target", target.plain_folder(None), "--prompts", prompts]
    command += ["--out", tmp_path, "--data", prompts.parent / "data", "--device", "cuda"]
    run = subprocess.run([*command, *FEW, *flags], env=environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert json.loads((tmp_path / result / "training.json").read_text())["steps"] == 2
    weights = [x for file in (tmp_path / result).glob("*.safetensors") for x in load_file(file).values()]
    assert weights
    assert all(bool(x.isfinite().all()) for x in weights if x.is_floating_point())
