"""soak.py: a correct server passes, and each fault is found."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import script
import soak as soak_script
from aiohttp import web
from records import read_record
from small_openai import Handler, SmallServer, answer
from soak import ProcessSample, Soak
from soak_traffic import SoakCounts

from outrider.server.bench import server_processes

pytestmark = pytest.mark.slow


async def right(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Repeats the prompt's first words; follows a schema."""
    text = body["messages"][0]["content"]
    if "response_format" in body:
        text = '{"title":"a","score":3,"kind":"task"}'
    return await answer(request, body, text=text, ttft=0.1, tpot=0.005)


def soak(
    handler: Handler, folder: Path, capsys: pytest.CaptureFixture[str], gauges: str = "", flags: tuple[str, ...] = ()
) -> tuple[int, str, Any]:
    results = folder / "soak.json"
    with SmallServer(handler) as server:
        server.gauges = gauges
        code = script.main(
            soak_script,
            [
                *("--url", server.url, "--minutes", "0.04", "--concurrency", "8", "--count", "6"),
                *("--json", str(results), *flags),
            ],
        )
    return code, capsys.readouterr().out, read_record(results)["results"]


def test_a_correct_server_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, record = soak(right, tmp_path, capsys, 'sglang:num_used_tokens{rank="0"} 0.0\n')
    assert code == 0, shown
    assert shown.endswith("nothing found\n")
    assert "the cache was empty after 0 s" in shown
    assert record["counts"]["compared"] == record["counts"]["whole"]["greedy"] > 0
    assert all(record["counts"]["asked"].values())
    assert record["counts"]["whole"]["given up"] < record["counts"]["asked"]["given up"]


def test_texts_that_change_under_load_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = 0

    async def changing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal running
        running += 1
        try:
            if running == 1:
                return await right(request, body)
            return await answer(request, body, text='{"title":3}' if "response_format" in body else "another")
        finally:
            running -= 1

    code, shown, record = soak(changing, tmp_path, capsys)
    assert code == 1
    assert 0 < record["counts"]["changed"] <= record["counts"]["compared"]
    assert record["counts"]["against_schema"] > 0
    assert "greedy answers are not what they were alone" in shown
    assert "changed: " in shown


def test_failures_are_found_and_refusals_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = 0

    async def failing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal number
        number += 1
        if number > 6 and number % 3 == 0:
            return web.json_response({"error": {"message": "broken"}}, status=429 if number % 2 else 500)
        return await right(request, body)

    code, shown, record = soak(failing, tmp_path, capsys)
    assert code == 1
    failures = record["counts"]["failures"]
    assert set(failures) == {"429", "500"}
    assert record["faults"] == [f"{failures['500']} requests failed"]
    assert "broken" in shown


def test_a_cache_that_stays_full_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_script, "EMPTY_SECONDS", 0.5)
    code, shown, _ = soak(right, tmp_path, capsys, "sglang:num_used_tokens 12.0\nsglang:num_running_reqs 0.0\n")
    assert code == 1
    assert "the cache is not empty: sglang:num_used_tokens 12, sglang:num_running_reqs 0" in shown


def test_memory_counts_held_memory_and_not_a_steps_workspace() -> None:
    def found(held: list[float]) -> Soak:
        samples = []
        for second, mb in enumerate(held):
            anonymous = {"scheduler": mb + 500 * (second % 3), "server": 100.0}
            files = 80.0 if second < 150 else second  # reclaimed pages that were read again
            samples.append(
                ProcessSample(float(second), {name: files + mb for name, mb in anonymous.items()}, anonymous)
            )
        return Soak(
            SoakCounts(), samples, len(held), 100.0, most_growth=32.0, may_not_change=True, emptied=0.0, held={}
        )

    warming = [100.0 + second for second in range(100)]
    assert found(warming + [200.0] * 200).faults() == []
    leaking = found(warming + [200.0 + second for second in range(200)])
    assert leaking.faults() == ["memory grew by 180 MB after the warm-up; 32 are allowed"]
    assert leaking.memory()["server"] == (100.0, 100.0)


def test_processes_of_a_server_are_found() -> None:
    with SmallServer(right) as server, subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        watched = server_processes.of_server(server.url)
        sample = ProcessSample.of(watched, 0.0)
    assert 10 < sample.anonymous["server"] < sample.resident["server"] < 100_000
    assert server_processes.of_server("http://192.0.2.1:80") is None
