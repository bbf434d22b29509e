"""Shared parts of the benchmarks."""

import argparse
import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from refusals import refuses
from running import wait_until

from outrider.server.bench import harness


def outputs(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_output_flags(parser, plot="a line")
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("parse", "good", "wrong", "said"),
    [
        (harness.positive_integers, {"1,8, 32,": [1, 8, 32]}, ["", ",", "two", "1,0", "-1", "1.5"],
         "is a list of positive numbers like 1,8"),
        (harness.numbers_from_zero, {"0,0.7": [0.0, 0.7]}, ["", "warm", "0,-1", "nan"], "is a list like 0,1 .*"),
        (harness.length_range, {"128": (128, 128), "64-192": (64, 192)},
         ["", "0", "-5", "9-8", "0-8", "1-2-3", "8-", "1.5"], "is a positive number of tokens, .* like 64-192"),
    ],
)  # fmt: skip
def test_numbers_of_flags(
    parse: Callable[[str, str], object], good: dict[str, object], wrong: list[str], said: str
) -> None:
    for text, value in good.items():
        assert parse("--flag", text) == value
    for text in wrong:
        refuses(f"--flag {said}, not '{text}'", parse, "--flag", text)


def test_the_flag_below_one_is_named() -> None:
    args = argparse.Namespace(rounds=1, new_tokens=0)
    harness.check_positive(args, "rounds")
    refuses(r"^--new-tokens is at least 1, not 0$", harness.check_positive, args, "rounds", "new_tokens")


def test_unwritable_files_are_refused_before_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.check_outputs(outputs("--json", str(tmp_path / "new.json"), "--plot", str(tmp_path / "new.png")))
    for flag in ("--json", "--plot"):
        wrong = outputs(flag, str(tmp_path / "nowhere" / "x.png"))
        refuses(f"{flag} .*nowhere/x.png: the folder .*nowhere does not exist", harness.check_outputs, wrong)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    harness.check_outputs(outputs("--json", str(tmp_path / "new.json")))
    refuses("--plot needs matplotlib", harness.check_outputs, outputs("--plot", str(tmp_path / "new.png")))


def test_arms_take_turns_and_each_begins_a_round() -> None:
    taken = list(harness.alternate_arms(3, [1, 8], ["off", "on", "planned"]))
    assert [turn[:2] for turn in taken[::3]] == [(0, 1), (0, 8), (1, 1), (1, 8), (2, 1), (2, 8)]
    assert [arm for _, _, arm in taken[:9:6] + taken[6:9]] == ["off", "on", "on", "planned", "off"]
    assert set(Counter(taken).values()) == {1}
    assert Counter(arm for _, _, arm in taken[::3]) == {"off": 2, "on": 2, "planned": 2}


def test_a_closed_loop_keeps_its_requests_in_flight_and_in_order() -> None:
    in_flight = most = 0

    async def ask(item: int) -> int:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        for _ in range(10 - item):
            await asyncio.sleep(0)
        in_flight -= 1
        return item * item

    answers, seconds = asyncio.run(harness.closed_loop(ask, range(7), 3))
    assert answers == [item * item for item in range(7)]
    assert most == 3
    assert seconds > 0


def test_ratios_are_of_the_same_round() -> None:
    ratio = harness.ratio([10, 30, 20], [5, 10, 20])
    assert ratio == (2, 1, 3)
    assert ratio.cell == "2.00 (1.00–3.00)"
    assert ratio.spread == "1.00–3.00"


def test_busy_processes_compute_and_are_gone_afterwards() -> None:
    before = set(psutil.Process().children())
    with harness.busy_processes(2):
        busy = set(psutil.Process().children()) - before
        assert len(busy) == 2
        wait_until(lambda: all(child.cpu_times().user > 0.1 for child in busy), seconds=20)
    assert not any(child.is_running() for child in busy)


def test_busy_processes_end_with_a_benchmark_that_is_killed() -> None:
    work = "import sys; from outrider.server.bench import harness; load = harness.busy_processes(1); load.__enter__()"
    work += "; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline()
        (busy,) = psutil.Process(benchmark.pid).children()
        benchmark.kill()
    try:
        wait_until(lambda: not busy.is_running() or busy.status() == psutil.STATUS_ZOMBIE, seconds=5)
    finally:
        busy.kill()
