"""`outrider tune`: measurements survive a kill, and the profile is used, also a block-diffusion model's."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from metrics_page import MetricsPage
from running import (
    HTTP,
    ONE_THREAD,
    OUTRIDER,
    ForkedServer,
    Server,
    environment,
    free_port,
    run_forked,
    start_forked,
    wait_until,
)
from small_target import SmallTarget
from tiny_diffusion import TinyDiffusion

from outrider.kernels.cache import cache_root
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.table import CalibrationTable

QUICK = ("tune", "--quick", "--activations", "float", "--max-requests", "2", "--name", "mine")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    for entry in cache_root().iterdir():
        if entry.name != "profiles":
            (folder / entry.name).symlink_to(entry)
    before = os.environ.get("OUTRIDER_CACHE")
    os.environ["OUTRIDER_CACHE"] = str(folder)
    yield folder
    os.environ.pop("OUTRIDER_CACHE")
    if before is not None:
        os.environ["OUTRIDER_CACHE"] = before


@pytest.fixture(scope="module")
def engine(small_target: SmallTarget) -> tuple[str, ...]:
    return ("--model", str(small_target.folder), "--drafter", "ngram", *ONE_THREAD)


def measured(partial: Path) -> list[dict]:
    """Points of a running measurement; neither its first line nor a torn last line is a point."""
    lines = partial.read_text().split("\n")[1:-1] if partial.exists() else []
    return [point for line in map(json.loads, lines) for point in line.get("points", ())]  # the rest are durations


def killed_and_resumed(words: Sequence[str], profiles: Path, log: Path) -> list[dict[str, Any]]:
    """Kill a measurement after three points and start it again; the points of its profile, with all of the first."""
    partial = profiles / ".mine.partial.jsonl"
    first = start_forked(words, environment(), log, log)
    wait_until(lambda: len(measured(partial)) >= 3 or first.poll() is not None, 180)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = measured(partial)
    assert len(kept) >= 3, log.read_text()
    second = run_forked(*words)
    assert second.returncode == 0, second.stderr
    assert "Calibration error (ECE)" in second.stdout or "--unmasking" in words
    points = json.loads((profiles / "mine" / "profile.json").read_text())["points"]
    for point in kept:
        shape = point["requests"], point["tokens"]
        alike = [found["seconds"] for found in points if (found["requests"], found["tokens"]) == shape]
        assert any(set(point["seconds"]) <= set(seconds) for seconds in alike), point
    assert not partial.exists()
    return points


@pytest.fixture(scope="module")
def profile(cache: Path, engine: tuple[str, ...]) -> Path:
    """A profile with a measurement that was killed once."""
    killed_and_resumed([*QUICK, *engine], cache / "profiles", cache / "first")
    return cache / "profiles" / "mine"


@pytest.mark.server
def test_the_measured_profile_is_complete(profile: Path) -> None:
    content = json.loads((profile / "profile.json").read_text())
    points = content["points"]
    assert {32, 128} <= {prefill["tokens"] for prefill in content["prefills"]}
    alone = {(p["requests"], p["tokens"]) for p in points if p["tokens"]}
    assert alone == {(r, r * n) for r in (1, 2) for n in (1, 3, 8)}
    table = CalibrationTable.load(profile / "calibration.json")
    drafts = {case: max(curve.samples) for case, curve in zip(CLASSES, table.by_class, strict=True)}
    assert table.gamma == 7
    assert drafts["greedy, lookup"] > drafts["greedy, model"] == drafts["sampled, model"] == 0


def refinement_yields(server: Server, partial: Path) -> None:
    """It improves without requests; a request gets the whole engine."""
    wait_until(lambda: len(measured(partial)) >= 2, 120)
    body = {"prompt": "one", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
    body["speculation"] = {"enabled": False}

    def counted() -> tuple[float, float]:
        page = MetricsPage(server.url)
        return page.value("outrider_decode_steps_total"), page.value("outrider_request_steps_total")

    for _ in range(5):  # an answer may be too fast, or shapes cancelled
        known = []
        with HTTP.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number % 300 == 0:
                    known.append(len(measured(partial)))
                if number == 300:
                    first_steps, first_requests = counted()
        last_steps, last_requests = counted()  # the end of a request updates the metrics
        assert answer.status_code == 200
        assert len(known) >= 4
        assert len(set(known)) == 1
        if last_requests - first_requests == last_steps - first_steps >= 100:  # one request in each step
            break
    assert last_requests - first_requests == last_steps - first_steps >= 100
    wait_until(lambda: len(measured(partial)) > known[0], 120)


@pytest.mark.server
def test_a_server_finds_its_profile_and_plans_by_it(profile: Path, engine: tuple[str, ...], tmp_path: Path) -> None:
    with ForkedServer(tmp_path / "log", *engine, "--max-total-tokens", "4096", "--tune") as server:
        assert "No profile fits" not in server.output()
        assert "Profile mine is a quick one: it is refined while no request is served" in server.output()
        refinement_yields(server, profile.parent / ".mine.partial.jsonl")
        body = {"prompt": "one two three one two three one two", "max_tokens": 24, "temperature": 0}
        body["min_tokens_per_second"] = 0.001
        for _ in range(2):
            server.post("completions", body)
        page = MetricsPage(server.url)
        assert page.value("outrider_predictable_step_seconds_total") > 0
        assert page.value("outrider_planner_seconds_count") > 0
        assert page.value("outrider_service_level_requests_total", met="true") > 0
        busy = {"quick": True, "rounds": 0}
        refused = HTTP.post(server.url + "/outrider/tune", json=busy, timeout=60)
        assert refused.status_code == 400
        assert "rounds" in refused.json()["error"]["message"]
        again = run_forked("tune", "--server", server.url, "--quick", "--max-requests", "1", "--name", "theirs")
        assert again.returncode == 0, again.stderr
        assert "Calibration error (ECE)" in again.stdout
        assert (profile.parent / "theirs" / "profile.json").exists()
        server.post("completions", body)


@pytest.mark.server
@pytest.mark.usefixtures("profile")
def test_a_profile_of_another_engine_is_refused_with_the_difference(engine: tuple[str, ...]) -> None:
    words = ["serve", "--port", str(free_port()), *engine, "--gamma", "3", "--profile", "mine"]
    refused = run_forked(*words)
    assert refused.returncode == 1
    assert "gamma: 7, here 3" in refused.stderr
    words[-1] = "nobody's"
    unknown = run_forked(*words)
    assert "mine" in unknown.stderr
    assert "outrider tune" in unknown.stderr


def test_a_missing_server_is_a_one_line_error() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [OUTRIDER, "tune", "--server", url], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert "no server answers" in done.stderr


FLAGS = ("--dtype", "float32", "--unmasking", "static")
PAIR = ("--max-requests", "2", "--name", "mine")


def answer(server: Server) -> str:
    body = {"model": "tiny", "prompt": "one two three", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    return str(server.post("completions", body)["choices"][0]["text"])


@pytest.mark.server
def test_of_block_diffusion_it_is_killed_resumed_and_refined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive tunes a block-diffusion model")
    model, cache = TinyDiffusion(tied=False).write(tmp_path / "model"), tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(cache_root() / "kernels")
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    profiles, partial = cache / "profiles", cache / "profiles" / ".mine.partial.jsonl"
    words = ["tune", "--quick", "--model", str(model), *FLAGS, *PAIR]
    points = killed_and_resumed(words, profiles, tmp_path / "first")
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
        wait_until(lambda: json.loads((profiles / "mine" / "profile.json").read_text())["thorough"], 400)
        assert not partial.exists()
        assert (profiles / "mine" / "draft-graphs.json").exists()
        assert answer(server) == expected
