"""`outrider bench load --url`: the times of its requests, and the summary of the answers."""

import asyncio
import csv
import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from records import read_record
from small_openai import SmallServer, answer, begun, load, send

from outrider.server import pictures
from outrider.server.bench import remote
from outrider.server.bench.load import arrivals, report, scenario
from outrider.server.bench.load.generate import Record
from outrider.server.bench.load.scenario import Bursts, Objectives, Rate
from outrider.server.bench.load.summary import summarise
from outrider.server.bench.remote import Reply
from outrider.server.cli.main import main

ROOT = Path(__file__).parents[4]
READY = sorted((ROOT / "deploy" / "loadtest").glob("*.toml"))

pytestmark = pytest.mark.usefixtures("childless")


def test_times_of_arrivals() -> None:
    def first(table: Rate | Bursts, rate: float, count: int) -> np.ndarray:
        arrived = arrivals.times(table, rate, np.random.default_rng(0))
        return np.array([next(arrived) for _ in range(count)])

    assert first(Rate(kind="fixed", rate=[4.0]), 4.0, 5).tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert first(Bursts(kind="bursts", rate=[2.0], size=3), 2.0, 7).tolist() == [0, 0, 0, 1.5, 1.5, 1.5, 3]
    gaps = np.diff(first(Rate(kind="poisson", rate=[5.0]), 5.0, 4001))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.08)  # an exponential distribution's equals its mean


def test_a_load_is_summed_up(tmp_path: Path) -> None:
    def one(due: float, **reply: Any) -> Record:
        return Record("", due, 0.0, Reply(**reply))

    records = [
        one(0.0, completion_tokens=11, ttft=1.0, seconds=11.0),  # five tokens come after the warm-up
        one(6.0, completion_tokens=11, ttft=0.5, seconds=1.5, gaps=[0.1] * 8 + [0.2], prompt_tokens=100),
        one(7.0, completion_tokens=5, prompt_tokens=5000, ttft=2.0, seconds=4.0),
        one(14.0, completion_tokens=11, prompt_tokens=20, ttft=0.5, seconds=2.0),  # ends after the measured time
        one(8.0, failure="429", seconds=0.01),
    ]
    summary = summarise(records, 2.0, warm_up=6.0, seconds=9.0, objectives=Objectives(ttft=1000, e2e=1900))
    assert (summary.asked, summary.whole, summary.failures) == (4, 3, {"429": 1})
    assert summary.throughput == pytest.approx((11 * 5 / 10 + 11 + 5 + 11 * 0.5 / 1.5) / 9)
    assert summary.with_prompts == pytest.approx(summary.throughput + (100 + 5000 + 20) / 9)
    assert {name: spread.p50 for name, spread in summary.ttft_by_prompt.items()} == {"to 256": 0.5, "over 4096": 2.0}
    assert summary.requests_per_second == pytest.approx(3 / 9)
    assert summary.ttft.p50 == 0.5
    assert summary.tpot.p50 == pytest.approx(0.15)
    assert (summary.gap.p50, summary.gap.largest) == (0.1, 0.2)
    assert (summary.goodput, summary.good) == (pytest.approx(1 / 9), 0.25)
    nothing = summarise(records[-1:], 2.0, 6.0, 9.0, Objectives())
    assert (nothing.whole, nothing.throughput, nothing.goodput, nothing.ttft) == (0, 0.0, None, None)
    _, first, second = report.table({1.0: {"a": [summary]}, 2.0: {"a": [nothing]}}, "req/s").splitlines()
    assert "500 ms" in first
    assert "– ms" in second
    assert second.endswith("429: 1")
    for results in ({1.0: {"a": [summary]}, 2.0: {"a": [nothing]}}, {2.0: {"a": [nothing]}}):
        with warnings.catch_warnings(action="error"), pictures.figure(tmp_path / "load.png") as figure:
            report.plot(results, "req/s", figure)


@pytest.mark.slow
def test_open_loop_does_not_wait_for_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A closed loop would send two."""

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await answer(request, body, ttft=0.8, tpot=0.05)

    results, rows, picture = tmp_path / "load.json", tmp_path / "load.csv", tmp_path / "load.png"
    with SmallServer(slow) as server:
        code, shown = load(
            capsys,
            *("--url", server.url, "--rate", "10", "--arrivals", "fixed", "--seconds", "1", "--warm-up", "0.5"),
            *("--new-tokens", "3", "--goodput", "ttft:5000", "tpot:1"),
            *("--json", str(results), "--csv", str(rows), "--plot", str(picture)),
        )
    assert code == 0
    assert len(server.asked) == 15
    assert all(body["max_tokens"] == 3 and body["stream"] for body in server.asked)
    [[measured]] = read_record(results)["results"]["10"].values()
    assert (measured["asked"], measured["whole"], measured["good"]) == (10, 10, 0.0)  # TPOT is 50 ms
    assert 0.8 <= measured["ttft"]["p50"] < 1.2
    assert 0.04 < measured["tpot"]["p50"] < 0.1
    assert "10/10" in shown
    with rows.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["warm_up"] for line in lines] == ["1"] * 5 + ["0"] * 10
    assert {line["completion_tokens"] for line in lines} == {"3"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_closed_loop_keeps_a_number_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    running, most = 0, 0

    async def counting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await answer(request, body, ttft=0.05)
        finally:
            running -= 1

    with SmallServer(counting) as server:
        code, _ = load(capsys, "--url", server.url, "--concurrency", "3", "--seconds", "0.6", "--warm-up", "0.1")
    assert (code, most) == (0, 3)
    assert len(server.asked) > 12


def test_a_closed_loop_that_is_refused_does_not_hammer(capsys: pytest.CaptureFixture[str]) -> None:
    async def refusing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "busy"}}, status=429)

    with SmallServer(refusing) as server:
        code, shown = load(capsys, "--url", server.url, "--concurrency", "3", "--seconds", "0.6", "--warm-up", "0")
    assert code == 1
    assert "429: 3" in shown


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_load_is_kept(sent: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = 0

    async def interrupting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal running
        running += 1
        try:
            if running == 2:
                os.kill(os.getpid(), sent)
            return await answer(request, body, ttft=0.05)
        finally:
            running -= 1

    written = tmp_path / "load.json"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a separate process
    try:
        with SmallServer(interrupting) as server:
            flags = ("--concurrency", "1,2", "--seconds", "0.5", "--warm-up", "0", "--json", str(written))
            code, shown = load(capsys, "--url", server.url, *flags)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    [(_, [measured])] = read_record(written)["results"]["1"].items()
    assert (measured["load"], measured["failures"]) == (1, {})
    assert measured["whole"] > 0
    assert "tok/s" in shown


@pytest.mark.slow
def test_failures_are_reported_separately(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal, a broken stream, one with an error and one that hangs: none is in the times."""

    async def failing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        number = len(server.asked) % 5
        if number == 0:
            return web.json_response({"error": {"message": "busy"}}, status=429)
        if number == 1:
            return await answer(request, body)
        response = await begun(request)
        if number == 2:
            await send(response, {"choices": [{"delta": {"content": "a"}}]})
        elif number == 3:
            await send(response, {"error": {"message": "the engine has died"}})
        else:
            await asyncio.sleep(5)
        return response

    with SmallServer(failing) as server:
        flags = ("--arrivals", "fixed", "--rate", "20", "--seconds", "1", "--warm-up", "0", "--timeout", "0.7")
        code, shown = load(capsys, "--url", server.url, *flags)
    assert code == 0
    for failure in ("429: 4", "stream: 8", "timeout: 4"):
        assert failure in shown
    assert "4/20" in shown


def test_the_first_token_of_a_tool_call_is_of_its_arguments() -> None:
    async def calling(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begun(request)
        for function in ({"name": "look", "arguments": None}, {"arguments": '{"a": '}, {"arguments": "1}"}):
            await send(response, {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": function}]}}]})
            await asyncio.sleep(0.1)
        await send(response, {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def ask(url: str) -> Reply:
        async with remote.connect(url) as server:
            return await server.ask(remote.CHAT, {"stream": True}, timeout=10)

    with SmallServer(calling) as server:
        reply = asyncio.run(ask(server.url))
    assert (reply.text, reply.failure, reply.completion_tokens, len(reply.gaps)) == ('{"a": 1}', "", 2, 1)
    assert 0 < reply.ttft <= reply.seconds - reply.gaps[0]


def test_lengths_are_in_the_tokens_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with SmallServer(answer) as server:
        load(
            capsys, *("--url", server.url, "--rate", "30", "--seconds", "0.5", "--warm-up", "0", "--input-tokens", "83")
        )
    words = {len(body["messages"][0]["content"].split()) for body in server.asked[2:]}
    assert words == {40}
    assert len({body["messages"][0]["content"] for body in server.asked[2:]}) > 8


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5400, "prompt": "Hello there", "output_length": 2},
        {"timestamp": 5000, "input_length": 1060, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 5200, "input_length": 1060, "output_length": 4, "hash_ids": [7, 8, 10]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    came: list[float] = []

    async def noting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        came.append(time.perf_counter())
        return await answer(request, body)

    with SmallServer(noting) as server:
        code, shown = load(
            capsys, "--url", server.url, "--trace", str(trace), "--speed", "2", "--seconds", "1", "--warm-up", "0"
        )
    assert code == 0
    assert "3/3" in shown
    asked = server.asked[2:]  # the first two requests measure how the server counts
    assert [body["max_tokens"] for body in asked] == [3, 4, 2]
    assert np.diff(came[2:]) == pytest.approx([0.1, 0.1], abs=0.08)
    first, second = (body["messages"][0]["content"].split() for body in asked[:2])
    shared = 2 * (512 // 2)
    assert first[:shared] == second[:shared]
    assert first[shared:] != second[shared:]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_shipped_scenarios_are_valid(path: Path) -> None:
    shipped = scenario.read(path, {})
    assert shipped.description
    assert all(file.is_file() for kind in shipped.requests for file in kind.prompts)


def test_a_scenario_runs_and_flags_win_over_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "one two"}\n')
    file = tmp_path / "own.toml"
    file.write_text(
        """
        seconds = 30
        warm_up = 0
        body = { temperature = 0.5, top_p = 0.9 }
        [arrivals]
        kind = "closed"
        concurrency = [1]
        [[requests]]
        prompts = "own.jsonl"
        output_tokens = { mean = 3, stdev = 1, min = 2, max = 4 }
        body = { top_p = 0.8 }
        """
    )
    with SmallServer(answer) as server:
        code, _ = load(capsys, "--url", server.url, "--scenario", str(file), "--seconds", "0.3", "--rate", "20")
    assert code == 0
    assert 2 <= len(server.asked) <= 20
    for body in server.asked:
        assert body["messages"][0]["content"] == "one two"
        assert (body["temperature"], body["top_p"]) == (0.5, 0.8)
        assert 2 <= body["max_tokens"] <= 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seconds = 0", "seconds: Input should be greater than 0"),
        ("secondes = 1", "secondes: Extra inputs are not permitted"),
        ("[arrivals]\nkind = 'closed'\nconcurrency = []", "concurrency: List should have at least 1 item"),
        ("[arrivals]\nkind = 'often'", "arrivals: Input tag 'often'"),
        ("[[requests]]\nprompts = 'a'\ninput_tokens = 3", "prompts, texts and input_tokens exclude each other"),
        ("[[requests]]\ninput_tokens = { min = 3 }", "input_tokens: give a mean, or min and max"),
        ("seconds =", "is not TOML"),
    ],
)
def test_wrong_scenarios_are_refused(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    assert main(["bench", "load", "--scenario", str(file)]) == 1
    said = capsys.readouterr().err
    assert reason in said
    assert len(said.splitlines()) == 1
