"""A block-diffusion model's profile is measured, killed, resumed, and refined in idle time."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from running import HTTP, OUTRIDER, Server, environment, wait_until
from tiny_diffusion import TinyDiffusion

from outrider.kernels.cache import cache_root

FLAGS = ("--dtype", "float32", "--unmasking", "static")
PAIR = ("--max-requests", "2", "--name", "mine")


def measured(partial: Path) -> list[dict]:
    """Points of a running measurement; neither its first line nor a torn last line is a point."""
    lines = partial.read_text().split("\n")[1:-1] if partial.exists() else []
    return [point for point in map(json.loads, lines) if "requests" in point]  # the rest are durations


def answer(server: Server) -> str:
    body = {"model": "tiny", "prompt": "one two three", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    response = HTTP.post(server.url + "/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.mark.server
def test_killed_resumed_and_refined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive tunes a block-diffusion model")
    model, cache = TinyDiffusion(tied=False).write(tmp_path / "model"), tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(cache_root() / "kernels")
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    partial, folder = cache / "profiles" / ".mine.partial.jsonl", cache / "profiles" / "mine"
    words = [OUTRIDER, "tune", "--quick", "--model", str(model), *FLAGS, *PAIR]
    first = subprocess.Popen(words, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL)
    wait_until(lambda: len(measured(partial)) >= 3 or first.poll() is not None, 180)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = measured(partial)
    assert len(kept) >= 3
    second = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    points = json.loads((folder / "profile.json").read_text())["points"]
    for point in kept:
        assert any(
            (found["requests"], found["tokens"]) == (point["requests"], point["tokens"])
            and set(point["seconds"]) <= set(found["seconds"])
            for found in points
        ), point
    assert not partial.exists()
    assert {point["requests"] for point in points} == {1, 2}

    with Server(
        tmp_path / "log", "--model", str(model), "--served-model-name", "tiny", *FLAGS, "--tune",
        "--max-running-requests", "2", "--max-total-tokens", "4096",
    ) as server:  # fmt: skip
        assert "Profile mine is a quick one: it is refined while no request is served" in server.output()
        expected = answer(server)
        wait_until(lambda: len(measured(partial)) >= 2, 120)
        assert answer(server) == expected
        known = len(measured(partial))
        wait_until(lambda: len(measured(partial)) > known, 120)
        wait_until(lambda: json.loads((folder / "profile.json").read_text())["thorough"], 400)
        assert not partial.exists()
        assert (folder / "draft-graphs.json").exists()
        assert answer(server) == expected
