"""Summary and table of `outrider bench load`."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.drafters.acceptance import Acceptance
from outrider.server import pictures
from outrider.server.bench.load import report
from outrider.server.bench.load.arms import acceptance_of
from outrider.server.bench.load.generate import Record
from outrider.server.bench.load.scenario import Objectives
from outrider.server.bench.load.summary import Summary, summarise
from outrider.server.bench.remote import Reply


def rounds(*throughputs: float, **more: object) -> list[Summary]:
    """One answer each: a second to its first token, then this many tokens per second."""
    summaries = []
    for rate in throughputs:
        reply = Reply(completion_tokens=11, ttft=1.0, seconds=1 + 10 / rate)
        summary = summarise([Record("", 0.0, 0.0, reply)], 8, 0.0, 1 + 10 / rate + 1e-9, Objectives())
        summaries.append(replace(summary, throughput=rate, **more))
    return summaries


def test_shares_of_requests_that_met_their_level() -> None:
    fast, slow = Reply(completion_tokens=11, ttft=0.5, seconds=1.5), Reply(completion_tokens=21, ttft=1.0, seconds=5.0)

    def kept(*asked: tuple[Reply, float | None], ttft: float | None = None) -> tuple[float | None, float | None]:
        records = [Record("", 0.0, 0.0, reply, level) for reply, level in asked]
        summary = summarise(records, 2, 0.0, 9.0, Objectives(ttft=ttft))
        return summary.level_kept, summary.good

    assert kept((fast, 9.0), (slow, None), (slow, 9.0))[0] == 0.5  # 10 tokens per second of 9 wanted, and 5
    assert kept((fast, 9.0), (Reply(failure="429"), 9.0))[0] == 0.5
    assert kept((fast, None)) == (None, None)
    assert kept((fast, 9.0), (slow, None), (slow, 9.0), (slow, 4.0), ttft=900)[1] == 0.25


def test_planned_is_compared_with_the_better_arm(tmp_path: Path) -> None:
    arms = {
        "off": rounds(5, 10, 15),
        "verify all": rounds(10, 20, 30),
        "planned": rounds(20, 40, 60, level_kept=0.75),
        "no levels": rounds(50, 50, 50),
    }
    assert report.best_of(arms, "planned") == "verify all"
    assert report.best_of({"planned": arms["planned"], "no levels": arms["no levels"]}, "planned") is None
    assert report.ratio(arms["off"], arms["off"][:2]) is None
    _, off, every, planned, _ = report.table({8: arms}, "in flight").splitlines()
    assert off.split()[:6] == ["8", "off", "3/3", "0.50", "10.0", "10.0"]
    assert every.endswith("none; 2.00 (2.00–2.00) × off")
    assert planned.endswith(
        "none; level kept 75%; 4.00 (4.00–4.00) × off; 2.00 (2.00–2.00) × the better of the others, verify all"
    )
    with pictures.figure(tmp_path / "load.png") as figure:
        report.plot({8: arms}, "in flight", figure)
    assert len(figure.axes[0].lines) == 4
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_acceptance_is_summed_up_by_arm() -> None:
    drafted = {"tau": 2.0, "cycles": 3, "tokens": 6, "tried": (3, 2), "kept": (2, 1)}
    nothing = {"tau": 1.0, "cycles": 5, "tokens": 5, "tried": (0, 0), "kept": (0, 0)}
    of_one = {"off": rounds(5, counts=nothing), "planned": rounds(5, 6, counts=drafted)}
    assert acceptance_of({1: of_one, 8: of_one}) == {"planned": Acceptance(12, 24, (12, 8), (8, 4))}


def test_readings_of_a_counter_are_subtracted() -> None:
    before, after = Acceptance(1, 2, (1, 1), (1, 0)), Acceptance(4, 9, (4, 3), (3, 2))
    assert after - before == Acceptance(3, 7, (3, 2), (2, 2))
    assert pytest.approx((after - before).accepted_length) == 7 / 3
