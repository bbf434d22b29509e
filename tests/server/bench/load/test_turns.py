"""Several servers of `outrider bench load --url` take turns."""

import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from records import read_record
from small_openai import Handler, SmallServer, answer, load

from outrider.server.bench import server_processes
from outrider.server.bench.load import by_url

pytestmark = pytest.mark.usefixtures("childless")


def test_learners_stop_meanwhile(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    states: dict[str, set[bool]] = {"learns": set(), "plain": set()}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        learner = psutil.Process(process.pid)

        def noting(name: str) -> Handler:
            async def asked(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                for _ in range(200):
                    if (stopped := learner.status() == psutil.STATUS_STOPPED) == (name == "plain"):
                        break
                    await asyncio.sleep(0.01)
                states[name].add(stopped)
                return await answer(request, body, ttft=0.05)

            return asked

        with SmallServer(noting("plain")) as plain, SmallServer(noting("learns")) as learns:
            family = {learns.url: server_processes.ServerProcesses({"learner": learner})}
            monkeypatch.setattr(server_processes, "of_server", family.get)
            monkeypatch.setattr(by_url, "LEARNER_SECONDS", 0)
            urls = f"plain={plain.url}", f"learns={learns.url}"
            code, shown = load(capsys, "--url", *urls, "--concurrency", "2", "--seconds", "0.3", "--warm-up", "0")
        assert learner.status() != psutil.STATUS_STOPPED
        process.kill()
    assert code == 0
    assert states == {"learns": {False}, "plain": {True}}
    assert "p99 gap" in shown


@pytest.mark.slow
def test_several_servers_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two servers never run at once, and each starts in turn."""
    order: list[str] = []
    computes = 0.05

    def named(name: str, tpot: float) -> Handler:
        async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            order.append(name)
            until = time.process_time() + computes * (name == "slow")
            while time.process_time() < until:
                pass
            return await answer(request, body, ttft=0.02, tpot=tpot)

        return handler

    written = tmp_path / "load.json"
    with SmallServer(named("fast", 0.01)) as fast, SmallServer(named("slow", 0.06)) as slow:
        flags = ("--concurrency", "2", "--seconds", "0.7", "--warm-up", "0.1", "--rounds", "2", "--new-tokens", "4")
        urls = (f"fast={fast.url}", f"slow={slow.url}/v1")
        code, shown = load(capsys, "--url", *urls, *flags, "--json", str(written))
    assert code == 0
    assert [name for name, _ in itertools.groupby(order)] == [
        "fast",
        "slow",
        "fast",
    ]  # the second round begins with slow
    measured = read_record(written)
    arms = measured["results"]["2"]
    assert [len(arms["fast"]), len(arms["slow"])] == [2, 2]
    ratio = statistics.median(
        s["throughput"] / f["throughput"] for s, f in zip(arms["slow"], arms["fast"], strict=True)
    )
    assert ratio < 0.7
    assert f"{ratio:.2f} (" in shown
    assert "× fast" in shown
    assert set(measured["memory_mb"]) == set(measured["models"]) == {"fast", "slow"}
    assert min(measured["memory_mb"].values()) > 1
    fast_ms, slow_ms = (statistics.median(run["processor_ms"] for run in arms[name]) for name in ("fast", "slow"))
    assert slow_ms > fast_ms + computes * 1e3 / 4 * 0.8, "an answer has 4 tokens"
    assert "processor time a token" in shown


def test_one_server_takes_turns_with_speculation_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--concurrency", "1", "--seconds", "0.1", "--warm-up", "0", "--rounds", "1", "--new-tokens", "2")
    with SmallServer(answer) as server:
        urls = (f"planned={server.url}", f"never={server.url}")
        code, shown = load(capsys, "--url", *urls, *flags, "--undrafted", "never")
    assert code == 0
    assert "× planned" in shown
    turns = [speculation for speculation, _ in itertools.groupby(body.get("speculation") for body in server.asked)]
    assert turns == [None, {"enabled": False}]


def test_every_round_has_new_texts_of_the_same_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers of a round get the same requests, later rounds new ones."""
    file = tmp_path / "mixed.toml"
    file.write_text("[[requests]]\ninput_tokens = { min = 20, max = 2000 }\nbody = { min_tokens_per_second = 1e9 }\n")
    written = tmp_path / "load.json"
    with SmallServer(answer) as first, SmallServer(answer) as two:
        flags = ("--arrivals", "fixed", "--rate", "20,30", "--seconds", "0.3", "--warm-up", "0", "--rounds", "2")
        urls = (f"one={first.url}", f"two={two.url}")
        code, shown = load(capsys, "--scenario", str(file), "--url", *urls, *flags, "--json", str(written))
    assert code == 0
    of_one, of_two = ([body["messages"][0]["content"] for body in server.asked[2:]] for server in (first, two))
    assert of_one == of_two
    assert len(set(of_one)) == len(of_one) == 30  # two rounds of 6 and 9 requests
    lengths = [len(text.split()) for text in of_one]
    assert lengths[:6] == lengths[6:12] == lengths[15:21]
    assert min(lengths) < 100 < 300 < max(lengths)
    for [measured, _] in read_record(written)["results"]["30"].values():
        assert measured["level_kept"] == 0.0
        assert len(measured["ttft_by_prompt"]) > 1
    assert "longest" in shown
