"""Options of a measurement, by flags and HTTP, and its shapes."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refuses

from outrider.scheduler.buckets import TokenBuckets
from outrider.server.tune import cli
from outrider.server.tune.diffusion import Rounds
from outrider.server.tune.effort import MARGIN_STEPS, QUICK, THOROUGH, Capacity, Effort, Shape
from outrider.server.tune.grid import capacity_of
from outrider.server.tune.request import TuneRequest


def test_requested_effort() -> None:
    assert TuneRequest().effort == THOROUGH
    assert TuneRequest(quick=True).effort == QUICK
    assert TuneRequest(quick=True, rounds=5).effort.rounds == 5
    assert TuneRequest(quick=True, max_requests=4).effort.requests == (1, 2, 4)
    for most, last in ((6, (6,)), (33, (32, 33)), (64, (64,)), (65, (64, 65)), (256, (256,))):
        powers = [2**n for n in range(9) if 2**n < last[0]]
        assert TuneRequest(max_requests=most).effort.requests == (*powers, *last)


def test_a_server_without_a_limit_measures_the_requested_numbers() -> None:
    engine: Any = SimpleNamespace(max_total_tokens=2_000_000, context_length=8192)
    shapes = TuneRequest(max_requests=256).effort.shapes(7, 7, capacity_of(engine, None, None))
    assert {shape.requests for shape in shapes} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    shapes = TuneRequest(max_requests=256).effort.shapes(7, 7, capacity_of(engine, 48, None))
    assert {shape.requests for shape in shapes} == {1, 2, 4, 8, 16, 32}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-requests", "0"], "--max-requests is at least 1, not 0"),
        (["--rounds", "0", "--server", "http://127.0.0.1:1"], "--rounds is at least 1, not 0"),
        *(
            (["--name", name], f"--name is made of letters, digits, dots, dashes and underscores, not {name!r}")
            for name in ("a b", "../up", "")
        ),
    ],
)
def test_impossible_flags(flags: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert refuses("", cli.run, parser.parse_args(flags)) == message


def test_shapes_fit_the_engine() -> None:
    effort = Effort(requests=(1, 2, 8), tokens=(1, 4, 9), contexts=(10,), steps=4)
    shapes = effort.shapes(7, 7, Capacity(4, 10_000, 8192))
    assert shapes == [Shape(1, 1, 10), Shape(1, 4, 10), Shape(2, 2, 10), Shape(2, 8, 10)]
    each = 10 + 2 * (7 + 1) + 4 + 3
    assert {s.requests for s in effort.shapes(7, 7, Capacity(4, 2 * each, 8192))} == {1, 2}
    assert {s.requests for s in effort.shapes(7, 7, Capacity(4, 2 * each - 1, 8192))} == {1}
    tokens = {s.tokens for s in THOROUGH.shapes(2, 5, Capacity(1, 10_000, 8192))}
    assert tokens == {1, 2, 3, 6}


@pytest.mark.parametrize("context", [32, 100, 200, 300, 1024, 2048])
def test_a_shape_ends_within_the_context(context: int) -> None:
    """It includes the drafts after the answer; for a dLLM the open block."""
    capacity, longest, rounds = Capacity(8, 100_000, context), 7, Rounds(block=4, mask=0, step=1, vocabulary=512)
    for shape in THOROUGH.shapes(7, longest, capacity):
        assert 1 <= shape.context <= context - THOROUGH.steps - MARGIN_STEPS - longest
    for shape in rounds.shapes(THOROUGH, capacity):
        assert 1 <= shape.context <= context - (THOROUGH.steps + MARGIN_STEPS) * rounds.step - rounds.block


@pytest.mark.parametrize(
    ("context", "prompts"),
    [
        *((2048, [128, 1024]), (1069, [128, 1024]), (1024, [128, 979]), (301, [128, 256])),
        *((300, [128]), (100, [55]), (45, [])),
    ],
)
def test_the_longest_prompt_that_fits_replaces_longer_ones(context: int, prompts: list[int]) -> None:
    """Another context nearly as long is not measured, as the slope would be noise."""
    assert Capacity(1, 10_000, context).prompts((128, 1024), 45) == prompts


def test_on_a_gpu_the_buckets_are_measured() -> None:
    """All buckets, or the ones with these tokens of every request."""
    buckets = TokenBuckets(8, 8)
    every = Effort(requests=(1, 3, 8), contexts=(10,)).shapes(7, 7, Capacity(8, 10_000, 8192), buckets.sizes)
    for requests in (1, 3, 8):
        tokens = [shape.tokens for shape in every if shape.requests == requests]
        assert tokens == [size for size in buckets.sizes if requests <= size <= 8 * requests]
    few = Effort(requests=(3,), tokens=(1, 3, 8), contexts=(10,)).shapes(7, 7, Capacity(8, 10_000, 8192), buckets.sizes)
    assert [shape.tokens for shape in few] == [buckets.round_up(3), buckets.round_up(9), buckets.round_up(24)]
    for shape in every + few:
        drafted = [shape.drafted(index) for index in range(shape.requests)]
        assert sum(drafted) + shape.requests == shape.tokens
        assert max(drafted) - min(drafted) <= 1
        assert 0 <= min(drafted) <= max(drafted) <= 7


def test_an_engine_too_small_for_any_shape_is_an_error() -> None:
    for capacity in (Capacity(64, 100, 8192), Capacity(64, 8192, 20)):
        with pytest.raises(
            RuntimeError, match=f"of {capacity.cache} tokens and contexts of {capacity.context} hold no step"
        ):
            QUICK.shapes(7, 7, capacity)
