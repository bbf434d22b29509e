"""`outrider doctor` names each fault and its remedy."""

import json
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from running import OUTRIDER, environment, free_port
from safetensors.torch import save_file

from outrider.profiles import store
from outrider.server.doctor import installation, machine, serving
from outrider.server.doctor.finding import Finding, Status
from outrider.server.machine import hardware, topology
from outrider.server.machine.topology import Core, Topology
from outrider.server.model import target
from outrider.server.settings import checkpoints, profile_lookup
from outrider.server.settings.activations import with_activations
from outrider.server.settings.settings import Settings

SOURCES = Path(__file__).parents[3] / ".src"


def only(findings: Iterable[Finding], status: Status) -> Finding:
    """The only finding, with a remedy unless it is right."""
    (finding,) = findings
    assert finding.status is status, finding
    assert bool(finding.remedy) == (status is not Status.OK)
    return finding


def last(findings: Iterable[Finding], status: Status) -> Finding:
    return only(list(findings)[-1:], status)


@pytest.mark.slow
@pytest.mark.skipif(hardware.has_gpu(), reason="a GPU machine compiles no kernels")
def test_sound_and_broken_parts_are_all_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [OUTRIDER, "doctor", "--json", "--port", port]
        env = environment(CXX="no-such-compiler", OUTRIDER_CACHE=str(tmp_path))
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}
    sound = {subject for subject, finding in findings.items() if finding["status"] == "ok"}
    assert sound >= {"python", "cache", "temporary", "gpu", "plugin", "model", "drafter", "model memory"}
    assert findings["address"]["status"] == "problem"
    assert port in findings["address"]["message"]
    assert findings["kernels"]["status"] == "warning"
    assert "no C++ compiler" in findings["kernels"]["message"]
    assert "apt-get install g++" in findings["kernels"]["remedy"]
    assert findings["profile"]["status"] == "warning"
    assert "here 'none'" in findings["profile"]["message"]


def test_without_its_packages_it_still_runs(tmp_path: Path) -> None:
    ours = Path(str(distribution("outrider").locate_file(""))).glob("outrider-*.dist-info")
    shutil.copytree(next(ours), tmp_path / "outrider-0.dist-info")
    code = f"import sys; sys.path += [{str(SOURCES)!r}, {str(tmp_path)!r}]; from outrider.server.cli import main; "
    code += "sys.exit(main.main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    finding = json.loads(done.stdout)["findings"][-1]
    assert (finding["subject"], finding["status"]) == ("packages", "problem")
    assert "packaging" in finding["message"]
    assert "make clean install" in finding["remedy"]


def test_packages_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "requires", lambda name: ["no-such-package>=2", "numpy<1", "never; extra == 'x'"])
    missing, unfit = installation.packages()
    assert missing.status is unfit.status is Status.PROBLEM
    assert missing.message == "missing: no-such-package>=2"
    assert "needed <1" in unfit.message


def test_a_package_that_is_there_and_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_torch.py").write_text("raise OSError('libtorch.so: file too short')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installation, "IMPORTED", ("half_a_torch",))
    assert "file too short" in only(installation.packages(), Status.PROBLEM).message


def test_kernels_that_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CPU_KERNELS", "0")
    assert "OUTRIDER_CPU_KERNELS" in last(installation.kernels(), Status.WARNING).remedy


@pytest.mark.parametrize(
    ("quota", "threads", "said"), [(1.5, "", "a quota of 1.5"), (None, "64", "OMP_NUM_THREADS=64")]
)
def test_limited_processors(monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: str, said: str) -> None:
    monkeypatch.setattr(topology, "here", lambda: Topology((Core(0, (0,)), Core(0, (1,))), quota))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert said in only(machine.processors(), Status.WARNING).message


@pytest.mark.parametrize(
    ("folder", "needed", "remedy"), [("/proc/outrider", 1, "OUTRIDER_CACHE"), ("/tmp", 1 << 60, "make room")]
)
def test_a_cache_that_cannot_be_used(folder: str, needed: int, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", folder)
    monkeypatch.setattr(machine, "CACHE_BYTES", needed)
    assert remedy in only(machine.cache(), Status.PROBLEM).remedy


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs torch for CPUs")
def test_a_gpu_with_packages_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        '#!/bin/sh\ncase "$1" in -L) echo "GPU 0: One";; *name*) echo One;; *driver*) echo 999;; *) echo 80000;; esac\n'
    )
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    hardware.gpu_count.cache_clear()
    try:
        finding = only(machine.gpu(Settings()), Status.PROBLEM)
    finally:
        hardware.gpu_count.cache_clear()
    assert "One, driver 999" in finding.message
    assert "OUTRIDER_DEVICE=cuda" in finding.remedy


CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 100, "model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return folder


def test_models_that_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(model: str) -> str:
        finding = last(serving.examine(Settings(model=model, port=free_port(), drafter="ngram")), Status.PROBLEM)
        assert finding.subject == "model"
        return finding.message

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "does not exist" in said(str(tmp_path / "none"))
    assert "local cache" in said("nobody/no-such-model")
    folder = model_folder(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer" in said(str(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "not a complete safetensors file" in said(str(folder))
    for header in (b"[1]", b'{"w": 1}', b'{"w": {"dtype": "F32"}}'):
        weights.write_bytes(struct.pack("<Q", len(header)) + header)
        assert "not a complete safetensors file" in said(str(folder))


def test_a_drafter_of_another_model(tmp_path: Path) -> None:
    another = str(checkpoints.WEIGHTS / "smollm2-135m-instruct" / "dspark")
    settings = Settings(model=str(model_folder(tmp_path)), port=free_port(), drafter="dspark", drafter_path=another)
    finding = only([each for each in serving.examine(settings) if each.subject == "drafter"], Status.PROBLEM)
    assert "hidden_size is 64" in finding.message
    assert "outrider train dspark" in finding.remedy


def test_a_damaged_drafter(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(checkpoints.WEIGHTS / "smollm2-135m-instruct" / "dspark", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 1 << 16])
    findings = serving.examine(Settings(port=free_port(), drafter="dspark", drafter_path=str(folder)))
    assert [each.subject for each in findings if each.status is Status.PROBLEM] == ["drafter"]


@pytest.mark.slow
def test_a_profile_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    model, settings = target.find(None), Settings(port=free_port(), tune=True)
    settings = with_activations(settings, model)
    here = profile_lookup.fingerprint(checkpoints.with_drafter_path(settings, model), model)
    shipped = store.read(store.SHIPPED / "smollm2-135m-instruct-dspark-zen5-2")

    def said(thorough: bool) -> str:
        new = replace(shipped, name="own", fingerprint=here, thorough=thorough, measured_at="2100-01-01T00:00:00+00:00")
        store.save(new, tmp_path / "profiles", None)
        return last(serving.examine(settings), Status.OK).message

    assert "own, thorough, of 2100" in said(True)
    assert "own, a quick one, of 2100" in said(False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "subject", "status", "said"),
    [
        ({"gamma": 5}, "profile", Status.WARNING, "none fits; the nearest, smollm2-135m-instruct-dspark"),
        ({"gamma": 5}, "profile", Status.WARNING, "gamma: 7, here 5"),
        ({"gamma": 5, "tune": True}, "profile", Status.WARNING, "the next start measures a quick one"),
        ({"gamma": 5, "tune": False}, "profile", Status.WARNING, "every draft is verified"),
        ({"max_total_tokens": 1 << 39}, "model memory", Status.PROBLEM, "too little memory"),
        ({"api_keys": Path("empty")}, "keys", Status.PROBLEM, "outrider key"),
        ({"api_keys": Path("text")}, "keys", Status.PROBLEM, "outrider key"),
        ({"ssl_certfile": "text"}, "certificate", Status.PROBLEM, "docs/secure.md"),
    ],
)
def test_settings_with_a_fault(
    settings: dict[str, object], subject: str, status: Status, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    Path("empty").touch()
    Path("text").write_text("no TOML [ or PEM")
    findings = serving.examine(Settings(port=free_port(), **settings))
    finding = only([each for each in findings if each.subject == subject], status)
    assert said in finding.message + finding.remedy


def test_an_unprotected_server_is_reported() -> None:
    assert "OUTRIDER_API_KEY" in next(serving.access(Settings(host="0.0.0.0", port=free_port()))).remedy
    assert next(serving.access(Settings(host="0.0.0.0", port=free_port(), api_key="k"))).status is Status.OK
