"""soak.py: a correct server passes, and each fault is found."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import script
import soak as soak_script
import soak_attacks as attacks
from aiohttp import web
from small_openai import Handler, SmallServer, answer
from soak_report import Soak
from soak_traffic import SoakCounts

from outrider.server.bench import record, remote, server_processes
from outrider.server.bench.server_processes import ProcessSample

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
    return code, capsys.readouterr().out, record.read(results)["results"]


def test_a_correct_server_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, record = soak(right, tmp_path, capsys, 'sglang:num_used_tokens{rank="0"} 0.0\n')
    assert code == 0, shown
    assert shown.endswith("nothing found\n")
    assert "cache empty after 0 s" in shown
    assert record["counts"]["compared"] == record["counts"]["whole"]["greedy"] > 0
    assert set(record["counts"]["asked"]) == {"greedy", "sampled", "schema", "given up"}
    assert record["counts"]["whole"].get("given up", 0) < record["counts"]["asked"]["given up"]


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


ATTACKED = ("--attack", "--minutes", "0.12", "--stretch", "2", "--concurrency", "4", "--timeout", "5")


def is_attack(request: web.Request, body: dict[str, Any]) -> bool:
    ordinary = len(body["messages"]) == 1 and isinstance(body["messages"][0]["content"], str)
    strange = {"top_k", "regex", "stop", "stop_token_ids", "logit_bias"} & body.keys()
    return bool(strange) or not ordinary or "kind" not in json.dumps(body.get("response_format", "kind"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks, "NEVER_ENDING_SECONDS", 0.5)
    monkeypatch.setattr(attacks, "PAUSE_SECONDS", 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_resists_all_attacks_but_the_open_body(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refusing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if is_attack(request, body):
            return web.json_response({"error": {"message": "no"}}, status=400)
        return await right(request, body)

    _, shown, record = soak(refusing, tmp_path, capsys, flags=(*ATTACKED, "--most-slower", "100"))
    attacked = record["attacked"]["outcomes"]
    assert attacked.keys() == attacks.ATTACKS.keys()
    assert attacked["top_k beyond int32"].keys() == {"400"}
    # aiohttp has no limit for a body, so neither has this server
    assert [fault.partition(":")[0] for fault in record["faults"]] == ["a body that never ends"], shown
    assert "slowest /health" in shown


@pytest.mark.usefixtures("impatient")
def test_a_server_that_an_attack_breaks_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def breaking(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if is_attack(request, body):
            return web.json_response({"error": {"message": "broken"}}, status=500 if "top_k" in body else 400)
        return await right(request, body)

    code, shown, record = soak(breaking, tmp_path, capsys, flags=ATTACKED)
    assert code == 1
    assert any(fault.startswith("top_k beyond int32: ") and fault.endswith("500") for fault in record["faults"]), shown


def test_a_server_that_attacks_slow_down_is_found() -> None:
    def found(beside: float) -> list[str]:
        counts = SoakCounts(waits=([1.0] * 90 + [2.0] * 10, [1.0] * 90 + [beside] * 10))
        return Soak(counts, [], 60.0, 20.0, 64.0, True, 0.0, {}, attacks.Attacked(), most_slower=1.5).faults()

    assert found(2.9) == []
    assert found(3.2) == ["p99 beside attackers is 1.60 × that without; 1.5 are allowed"]


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
    assert leaking.growth()["server"].after_warm_up == 0


def test_processes_of_a_server_are_found() -> None:
    with SmallServer(right) as server, subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        watched = server_processes.of_server(server.url)
        assert watched is not None
        sample = watched.sample()
    assert 10 < sample.anonymous["server"] < sample.resident["server"] < 100_000
    assert server_processes.of_server("http://192.0.2.1:80") is None


def test_a_lost_server_is_a_fault_and_does_not_end_the_soak() -> None:
    async def attack() -> dict[str, int]:
        async with aiohttp.ClientSession() as session:
            attacked = attacks.Attacked()
            server = remote.Remote("http://127.0.0.1:9", "m", session)
            await attacks.Attacker(server, "a body that never ends", 0, 5.0, attacked).attack()
            return attacked.outcomes["a body that never ends"]

    assert asyncio.run(attack()) == {"connection": 1}
