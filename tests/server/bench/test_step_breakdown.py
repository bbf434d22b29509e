"""Every moment of a step belongs to one part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.server.bench import step_breakdown
from outrider.server.plugin.hooks import step_profiler
from outrider.server.plugin.hooks.step_profiler import (
    COMMIT,
    DRAFT,
    FORWARD,
    PLAN,
    PRODUCTS,
    SCHEDULER,
    WORKER,
    StepLog,
    Stopwatch,
)


def test_time_goes_to_the_innermost_part() -> None:
    now, compiled = 0.0, 0.0

    def spend(seconds: float, in_products: float = 0.0) -> None:
        nonlocal now, compiled
        now += seconds
        compiled += in_products

    def products() -> dict[str, float]:
        nonlocal compiled
        spent, compiled = compiled, 0.0
        return {PRODUCTS: spent}

    watch = Stopwatch(lambda: now, products)
    forward = watch.timed(FORWARD, lambda: spend(5, in_products=3))

    def work() -> None:
        spend(1)
        forward()
        spend(2)

    spend(10)
    watch.timed(WORKER, work)()
    spend(20)
    assert watch.lap() == {SCHEDULER: 30, WORKER: 3, FORWARD: 2, PRODUCTS: 3}
    assert sum(watch.lap().values()) == 0


def test_an_error_leaves_its_part() -> None:
    watch = Stopwatch(lambda: 0.0)

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        watch.timed(WORKER, fail)()
    assert watch.stack == [SCHEDULER]


def test_steps_are_summed_up_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    lines = [
        {"requests": 2, "tokens": 6, "prefill": False, "seconds": {PRODUCTS: seconds, SCHEDULER: 0.001}}
        for seconds in (9.0, 0.002, 0.004, 0.003)
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = step_breakdown.read(log)
    assert found[2, 6, False].steps == 3
    assert found[2, 6, False].parts[PRODUCTS] == pytest.approx(3)
    assert found[2, 6, False].total == pytest.approx(4)
    step_breakdown.report(found, {"2x3": (2, 6, False), "9x9": (9, 81, False)}, {"2x3": 1.25})
    row = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2x3")]
    assert row[0].split("|")[-3:-1] == [" 4.0 ", " 1.2 "]


def test_nothing_is_timed_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(step_profiler.ENV, raising=False)
    step_profiler.install_if_asked()  # would need SGLang


def test_a_step_lasts_until_the_next(tmp_path: Path) -> None:
    class Batch:
        reqs = (1, 2)

        class forward_mode:
            is_extend = staticmethod(lambda: False)

    log = StepLog(tmp_path / "log")
    now = iter(range(100))
    log.watch = Stopwatch(lambda: float(next(now)))
    for _ in range(3):
        assert log.run_batch(lambda scheduler, batch: "result", None, Batch()) == "result"
    written = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [step["requests"] for step in written] == [2, 2]
    assert all(step["seconds"][SCHEDULER] > 0 for step in written)


def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    """Nothing that is measured is missing from the table."""
    path = tmp_path / "log"
    seconds = {part: 0.001 * (k + 1) for k, part in enumerate(step_profiler.PARTS)}
    path.write_text(json.dumps({"requests": 1, "tokens": 1, "prefill": False, "seconds": seconds}) + "\n")
    (found,) = step_breakdown.read(path).values()
    assert sum(found.parts.values()) == pytest.approx(found.total)
    assert {*step_profiler.COMPILED, DRAFT, PLAN, COMMIT, FORWARD, WORKER, SCHEDULER} == set(step_profiler.PARTS)
