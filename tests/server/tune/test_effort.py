"""What a measurement is asked to do, in one form for flags and HTTP, and what it says while it runs."""

from __future__ import annotations

import argparse

import pytest

from outrider.scheduler.planners.tiers import Tiers
from outrider.server.errors import UserError
from outrider.server.tune import cli, events
from outrider.server.tune.effort import QUICK, THOROUGH, Effort, Shape
from outrider.server.tune.events import Failed, Finished, Progress
from outrider.server.tune.request import BadOption, TuneRequest


def test_effort_asked_for() -> None:
    assert TuneRequest().effort == THOROUGH
    assert TuneRequest(quick=True).effort == QUICK
    assert TuneRequest(quick=True, rounds=5).effort.rounds == 5
    assert TuneRequest(max_requests=6).effort.requests == (1, 2, 4, 6)
    assert TuneRequest(max_requests=64).effort.requests == (1, 2, 4, 8, 16, 32, 64)
    assert TuneRequest(quick=True, max_requests=4).effort.requests == (1, 2, 4)


@pytest.mark.parametrize(("option", "value"), [("max_requests", 0), ("rounds", -1), ("name", "../up"), ("name", "")])
def test_options_that_cannot_be(option: str, value: object) -> None:
    with pytest.raises(BadOption) as bad:
        TuneRequest(**{option: value})
    assert bad.value.option == option


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-requests", "0"], "--max-requests is at least 1, not 0"),
        (["--rounds", "0", "--server", "http://127.0.0.1:1"], "--rounds is at least 1, not 0"),
        (["--name", "a b"], "--name is made of letters, digits, dots, dashes and underscores, not 'a b'"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(UserError) as refused:
        cli.run(parser.parse_args(flags))
    assert str(refused.value) == message


def test_shapes_fit_the_engine() -> None:
    effort = Effort(requests=(1, 2, 8), tokens=(1, 4, 9), contexts=(10,), steps=4)
    shapes = effort.shapes(gamma=7, longest=7, max_requests=4, max_total_tokens=10_000)
    assert shapes == [Shape(1, 1, 10), Shape(1, 4, 10), Shape(2, 2, 10), Shape(2, 8, 10)]
    room = 10 + 2 * (7 + 1) + 4 + 3
    assert {s.requests for s in effort.shapes(gamma=7, longest=7, max_requests=4, max_total_tokens=2 * room)} == {1, 2}
    assert {s.requests for s in effort.shapes(gamma=7, longest=7, max_requests=4, max_total_tokens=2 * room - 1)} == {1}
    tokens = {s.tokens for s in THOROUGH.shapes(gamma=2, longest=5, max_requests=1, max_total_tokens=10_000)}
    assert tokens == {1, 2, 3, 6}


def test_on_a_gpu_the_tiers_are_what_is_measured() -> None:
    """Each of them, or those that hold so many tokens of every request; all of a shape's tokens are somebody's."""
    tiers = Tiers(8, 8)
    every = Effort(requests=(1, 3, 8), contexts=(10,)).shapes(7, 7, 8, 10_000, tiers.sizes)
    for requests in (1, 3, 8):
        found = [shape.tokens for shape in every if shape.requests == requests]
        assert found == [size for size in tiers.sizes if requests <= size <= 8 * requests]
    few = Effort(requests=(3,), tokens=(1, 3, 8), contexts=(10,)).shapes(7, 7, 8, 10_000, tiers.sizes)
    assert [shape.tokens for shape in few] == [tiers.hold(3), tiers.hold(9), tiers.hold(24)]
    for shape in every + few:
        drafted = [shape.drafted(index) for index in range(shape.requests)]
        assert sum(drafted) + shape.requests == shape.tokens
        assert max(drafted) - min(drafted) <= 1
        assert 0 <= min(drafted) <= max(drafted) <= 7


def test_an_engine_too_small_for_any_shape_is_told() -> None:
    with pytest.raises(RuntimeError, match="a KV cache of 100 tokens"):
        QUICK.shapes(gamma=7, longest=7, max_requests=64, max_total_tokens=100)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Progress("answers", 3, 12), '{"progress": ["answers", 3, 12]}\n'),
        (Finished("a\nb", "/x"), '{"table": "a\\nb", "folder": "/x"}\n'),
        (Failed("busy"), '{"error": "busy"}\n'),
    ],
)
def test_events_as_lines(event: events.Event, line: str) -> None:
    assert events.to_line(event) == line
    assert events.from_line(line.encode()) == event
