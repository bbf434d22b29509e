"""Commands that fail say why in one line, without a traceback."""

import json
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refuses
from running import OUTRIDER, environment, free_port, run_forked

from outrider.kernels.cache import cache_root
from outrider.kernels.cpu import native
from outrider.server.machine import hardware
from outrider.server.model import bundled_model, cached_folder, gguf_model
from outrider.server.plugin.loading import gguf_weights
from outrider.server.settings.resolve import resolve
from outrider.server.settings.settings import Settings

pytestmark = pytest.mark.slow


def run(*arguments: str, seconds: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [OUTRIDER, *arguments], capture_output=True, text=True, timeout=seconds, env=environment(**env), check=False
    )


def serve_fails(*flags: str, start: Callable[..., subprocess.CompletedProcess[str]] = run_forked) -> str:
    port = () if "--port" in flags else ("--port", str(free_port()))
    result = start("serve", *port, *flags)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("outrider: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.rstrip().endswith(lines[0])
    return lines[0]


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in serve_fails("--port", str(port), start=run)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gamma", "0"], "--gamma is a number from 1 to 64, not 0"),
        (["--api-key", " "], "--api-key is empty"),
        (["--model", "./no/such/folder"], "model folder ./no/such/folder does not exist"),
        (["--model", "nobody/no-such-model"], "HF_HUB_OFFLINE is set"),
        (["--max-total-tokens", "1000000000"], "too little memory for SmolLM2-135M-Instruct: weights 0."),
    ],
)
def test_impossible_values(flags: list[str], message: str) -> None:
    assert message in serve_fails(*flags)


@pytest.mark.skipif(hardware.has_gpu(), reason="needs a machine without a GPU")
def test_a_gpu_is_requested_without_one() -> None:
    assert "finds no GPU" in serve_fails("--device", "cuda")


HEADER = json.dumps({"w": {"dtype": "BF16", "shape": [1000], "data_offsets": [0, 2000]}}).encode()
MODEL = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}


@pytest.mark.parametrize(
    ("message", "files"),
    [
        ("has no config.json", {}),
        ("cannot be read", {"config.json": b"{"}),
        ("names no architecture", {"config.json": b'{"a": 1}'}),
        ("has no weights", MODEL),
        ("not a complete safetensors file", MODEL | {"model.safetensors": struct.pack("<Q", len(HEADER)) + HEADER}),
        ("is not a GGUF file", {"model.gguf": b""}),
    ],
)
def test_folders_that_are_no_models(message: str, files: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    model = tmp_path / "model.gguf" if "model.gguf" in files else tmp_path
    refuses(message, resolve, Settings(model=str(model), device="cpu"))


@pytest.mark.server
def test_engine_that_fails_while_loading_names_the_reason(tmp_path: Path) -> None:
    source = bundled_model.prepare()
    folder = tmp_path / "odd"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 50000}))
    line = serve_fails("--model", str(folder), "--max-total-tokens", "2048")
    assert "the engine could not start" in line
    assert "49152" in line


@pytest.mark.server
def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    for path in bundled_model.prepare().iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "contains custom code" in serve_fails("--model", str(tmp_path), "--max-total-tokens", "2048")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), ("serve", "prepare", "bench", "outrider serve --model", "OpenAI")),
        (("serve",), ("--model", "--drafter", "--gamma", "--api-key", "--max-total-tokens", "-- SGLANG_FLAG")),
    ],
)
def test_help_teaches_and_is_quick(words: tuple[str, ...], shown: tuple[str, ...]) -> None:
    done = run(*words, "--help", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "sglang", "transformers", "fastapi", "numpy"}
    assert not [word for word in shown if word not in done.stdout]


def test_version() -> None:
    assert run("--version").stdout.startswith("outrider ")
    shown = run("version").stdout
    assert "sglang 0.5" in shown
    assert "torch 2." in shown


def embedded_folder() -> Path:
    return gguf_model.folder(bundled_model.find_gguf(), bundled_model.NAME)


def test_embedded_model_survives_kills_and_races(tmp_path: Path) -> None:
    """It is killed halfway, then started twice at once: one complete folder remains."""
    cache = {"OUTRIDER_CACHE": str(tmp_path)}
    models = tmp_path / "models"
    if native.available():
        (tmp_path / "kernels").symlink_to(cache_root() / "kernels")  # compiling them takes minutes
    killed = subprocess.Popen([OUTRIDER, "prepare"], env=environment(**cache), stderr=subprocess.DEVNULL)
    while not any(".tmp-" in path.name for path in models.glob("*")):
        assert killed.poll() is None
        time.sleep(0.02)
    killed.kill()
    killed.wait(60)
    target = models / embedded_folder().name
    assert not target.exists()

    both = [
        subprocess.Popen([OUTRIDER, "prepare"], env=environment(**cache), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=200)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert printed == [str(target)] * 2
    assert [path for path in models.iterdir() if not path.name.endswith(".lock")] == [target]
    assert json.loads((target / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_damaged_embedded_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bundled_model.prepare()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    copy = embedded_folder()
    shutil.copytree(source, copy, symlinks=True)
    assert cached_folder.is_intact(copy)
    with (copy / "tokenizer.json").open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))
    assert not cached_folder.is_intact(copy)
    shutil.copy(source / "tokenizer.json", copy)
    assert cached_folder.is_intact(copy)
    (copy / gguf_weights.link_name(0)).unlink()
    (copy / gguf_weights.link_name(0)).symlink_to(tmp_path / "gone.gguf")
    assert not cached_folder.is_intact(copy)


def test_embedded_model_needs_room_and_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_model, "ROOM", 10**18)
    refuses("set OUTRIDER_CACHE to a folder with more room", bundled_model.prepare)
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "below"))
    refuses("cannot write the model SmolLM2-135M-Instruct", bundled_model.prepare)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/outrider")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path(os.path.expanduser("~/.cache/outrider"))
