"""Times the steps of an engine shape by shape; a killed measurement can be continued."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial as partial_of
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from outrider.profiles.measurement_log import PartialMeasurement
from outrider.profiles.store import Profile
from outrider.scheduler.cost.step_times import Point

from .effort import Capacity, Effort, Shape
from .idle import IdleBudget

if TYPE_CHECKING:
    from ..processes.engine import Engine

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Receives the name of a task, the units done and their total."""

CONCURRENCY = 8
"""Answers written at a time."""


class Run(Protocol):
    """Runs a piece of a measurement; see `tune.idle`."""

    async def __call__(self, piece: Callable[[], Awaitable[T]]) -> T: ...


def capacity_of(engine: Engine, limit: int | None, refined: Profile | None) -> Capacity:
    """Return the engine's capacity for a measurement. limit: of requests at a time; None: as many as the cache holds.
    refined: None for an engine without users; else half of the cache is left to them."""
    cache = engine.max_total_tokens // (1 if refined is None else 2)
    return Capacity(cache if limit is None else limit, cache, engine.context_length)


def prompt_of(index: int, length: int, vocabulary: int) -> list[int]:
    """Return meaningless tokens that share no beginning with another request's."""
    first = min(100, vocabulary // 2)
    return [(7919 * index + 104729 * k) % min(997, vocabulary - first) + first for k in range(length)]


async def measure_grid(
    manager: Any,
    shapes: Sequence[Shape],
    measure_shape: Callable[[Any, Shape, int], Awaitable[list[Point]]],
    effort: Effort,
    partial: PartialMeasurement,
    progress: Progress,
    run: Run,
) -> list[Point]:
    """Time the shapes in turn, each `effort.rounds` times less those in `partial`; return all their points. Raises
    RuntimeError if there are none."""
    turns = [(round_number, shape) for round_number in range(effort.rounds) for shape in shapes]
    budget = IdleBudget(effort.seconds, partial.seconds if partial.points else 0.0)

    async def measure(shape: Shape) -> list[Point]:
        before = budget.spent
        try:
            return await run(budget.timed(partial_of(measure_shape, manager, shape, effort.steps)))
        finally:
            partial.spend(budget.spent - before)

    await measure(shapes[0])  # warm
    for number, (round_number, shape) in enumerate(turns, 1):
        if budget.exhausted:
            break
        key = shape.requests, shape.tokens, shape.total_context(effort.steps)
        if partial.times[key] <= round_number and (points := await measure(shape)):
            partial.add(key, points)
        progress("step times", number, len(turns))
    if not (points := points_of(partial.points, shapes, effort.steps)):
        raise RuntimeError("no step ran alone; is the server busy?")
    return points


def points_of(points: Sequence[Point], shapes: Sequence[Shape], steps: int) -> list[Point]:
    """Return the points of these shapes. Others, left by an interrupted measurement, may have contexts that differ by a
    few tokens, and a slope between them would be noise."""
    wanted = {(shape.requests, shape.total_context(steps)) for shape in shapes}
    return [point for point in points if (point.requests, point.context) in wanted]


def merge_refined(points: list[Point], refined: Sequence[Point]) -> list[Point]:
    """Return the points, and `refined` points of numbers of requests that `points` lacks."""
    sizes = {point.requests for point in points}
    return points + [point for point in refined if point.requests not in sizes]


async def answer_all(
    questions: Sequence[tuple[str, float]],
    answer: Callable[[Sequence[tuple[str, float]]], Awaitable[T]],
    seconds: float | None,
    progress: Progress,
    run: Run,
) -> list[T]:
    """Return results of `answer`, each for a few questions with their temperatures, until `seconds` of work are spent.
    seconds: None for no limit."""
    results, budget = [], IdleBudget(seconds)
    for start in range(0, len(questions), CONCURRENCY):
        if budget.exhausted:
            break
        part = questions[start : start + CONCURRENCY]
        results.append(await run(budget.timed(partial_of(answer, part))))
        progress("answers", start + len(part), len(questions))
    return results
