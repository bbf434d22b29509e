"""Measures what a running engine's steps cost and how well its drafter's confidences hold.

Steps of exact shapes: R requests whose drafts are filled up to the same length, timed inside the worker from one decode
step to the next, so that scheduling and process hops are part of the cost. Confidences: answers to a mixed set of
prompts, every draft verified; a part of the prompts is held out to judge the calibration.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import outrider.profiles
from outrider.drafters.training.prompts import read_samples
from outrider.profiles import store
from outrider.profiles.measurement_log import PartialMeasurement
from outrider.profiles.store import Profile
from outrider.scheduler.calibration.fit import fit_table
from outrider.scheduler.calibration.records import Records
from outrider.scheduler.cost.step_times import Point, merge
from outrider.server.engine import client, profile_lookup
from outrider.server.engine.settings import Settings
from outrider.server.plugin import control
from outrider.server.plugin.options import RequestOptions
from outrider.server.tune.effort import MARGIN_STEPS, Effort, Shape
from outrider.server.tune.events import Progress
from outrider.server.tune.report import Tuned

if TYPE_CHECKING:
    from outrider.server.engine.engine import Engine
    from outrider.server.engine.resolve import Resolved

T = TypeVar("T")

PROMPTS = Path(outrider.profiles.__file__).parent / "prompts.jsonl"
SAMPLED = (1.0, 0.7, 0.4)
"""Temperatures of the sampled class: how far confidences are off changes with the temperature, and it has one fit."""
CONCURRENCY = 8
"""Answers written at a time for the calibration."""
MAX_REQUESTS = 64
"""More than any grid measures, for servers without a limit of their own."""


async def measure_shape(manager: Any, shape: Shape, steps: int) -> list[Point]:
    """Run `shape.requests` requests and time their steps: the step without drafting and, where they draft, the draft.

    Answers are streamed, as they mostly are when served: the processes that bring tokens to the client share the cores.
    Nothing comes back where no step ran in exactly that shape, because others were using the engine.
    """
    await control.command(manager, control.FORGET)
    options = RequestOptions(enabled=shape.tokens > 1, gamma=shape.tokens - 1, planned=False, padded=True)
    await asyncio.gather(
        *(
            client.generate(
                manager,
                [(7919 * index + 104729 * k) % 997 + 100 for k in range(shape.context)],
                temperature=0.0,
                max_new_tokens=steps + MARGIN_STEPS,
                ignore_eos=True,
                custom_params=options.to_custom_params(),
                stream=True,
            )
            for index in range(shape.requests)
        )
    )
    return _points((await control.read(manager))["steps"], shape, shape.total_context(steps))


def _points(log: dict[str, list[Any]], shape: Shape, context: float) -> list[Point]:
    count = shape.requests * shape.tokens
    shapes = zip(log["requests"], log["tokens"], strict=True)
    exact = [i for i, found in enumerate(shapes) if found == (shape.requests, count)][1:]
    if not exact:
        return []
    step = statistics.median(log["seconds"][i] - log["draft_seconds"][i] for i in exact)
    points = [Point(shape.requests, count, context, (step,))]
    # Where the model drafted for all: what prompt lookup found takes no time to speak of.
    drafts = [log["draft_seconds"][i] for i in exact if log["drafting"][i] == shape.requests]
    if drafts:
        points.append(Point(shape.requests, 0, context, (statistics.median(drafts),), drafted=True))
    return points


async def record_answers(
    manager: Any,
    questions: Sequence[tuple[str, float]],
    *,
    new_tokens: int,
    concurrency: int,
    context_length: int,
    progress: Callable[[Progress], None],
) -> Records:
    """Answer every question at temperature 0 and at its own, with all drafts verified; what the worker recorded."""
    await control.command(manager, control.FORGET)
    asked = [(question, 0.0) for question, _ in questions] + list(questions)
    gate, done = asyncio.Semaphore(concurrency), 0

    async def ask(question: str, temperature: float) -> None:
        nonlocal done
        async with gate:
            ids = client.chat_ids(manager, question)
            room = context_length - len(ids) - 1
            if room > 0:
                await client.generate(
                    manager,
                    ids,
                    temperature=temperature,
                    max_new_tokens=min(new_tokens, room),
                    custom_params=RequestOptions(planned=False).to_custom_params(),
                )
            done += 1
            progress(Progress("answers", done, len(asked)))

    await asyncio.gather(*(ask(question, temperature) for question, temperature in asked))
    return to_records((await control.read(manager))["records"])


def to_records(lists: dict[str, list[Any]]) -> Records:
    """What `control.read` brought, as arrays."""
    return Records(
        confidence=np.asarray(lists["confidence"], dtype=np.float64),
        verify_lens=np.asarray(lists["verify_lens"], dtype=np.int64),
        accepted=np.asarray(lists["accepted"], dtype=np.int64),
        cases=np.asarray(lists["cases"], dtype=np.int64),
    )


def with_temperatures(questions: Sequence[str]) -> list[tuple[str, float]]:
    """Each question with one of SAMPLED, another one after nine: of prompts that come in turn, as the built-in ones do,
    every kind meets each of them, and so do both parts of `split`."""
    return [(question, SAMPLED[place // 9 % len(SAMPLED)]) for place, question in enumerate(questions)]


def split(questions: Sequence[T]) -> Iterator[Sequence[T]]:
    """Two thirds to fit on, one third held out: one of each three neighbours, which are often alike.

    Which of the three changes from one three to the next, so that kinds of prompts that come in turn, as the built-in
    ones do, have equal shares of both parts.
    """
    held_out = {i for i in range(len(questions)) if (i + i // 3) % 3 == 2}
    yield [q for i, q in enumerate(questions) if i not in held_out]
    yield [q for i, q in enumerate(questions) if i in held_out]


def no_progress(progress: Progress) -> None:
    """Say nothing."""


async def tune(
    engine: Engine,
    resolved: Resolved,
    effort: Effort,
    *,
    questions: Sequence[str] | None = None,
    how: str = "at start",
    progress: Callable[[Progress], None] = no_progress,
) -> Tuned:
    """Measure an engine, write the profile to the folder `resolved.settings.profile` and have the engine plan by it.

    Step times are kept as they come, beside that folder, and a later call goes on from them. Raises RuntimeError when
    nothing could be measured.
    """
    settings = resolved.settings
    assert settings.profile is not None
    manager, folder = engine.tokenizer_manager, Path(settings.profile)
    here = profile_lookup.fingerprint(settings, resolved.model)
    partial = PartialMeasurement(folder.parent / f".{folder.name}.partial.jsonl", here)
    await _measure_grid(engine, settings, effort, partial, progress)
    if not partial.points:
        raise RuntimeError("no step ran alone; is the server busy?")
    asked = list(questions or built_in_questions())[: effort.prompts]
    parts = []
    for part in split(with_temperatures(asked)):
        parts.append(
            await record_answers(
                manager,
                part,
                new_tokens=effort.new_tokens,
                concurrency=CONCURRENCY,
                context_length=engine.context_length,
                progress=progress,
            )
        )
    calibration = fit_table(*parts, dataset=f"{len(asked)} prompts, greedy and sampled")
    profile = Profile(
        name=folder.name,
        fingerprint=here,
        points=tuple(merge(partial.points)),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        measured_how=how,
    )
    saved = store.save(profile, folder.parent, calibration.to_json())
    partial.discard()
    await control.command(manager, control.RELOAD)
    return Tuned(saved, calibration, parts[1])


async def _measure_grid(
    engine: Engine,
    settings: Settings,
    effort: Effort,
    partial: PartialMeasurement,
    progress: Callable[[Progress], None],
) -> None:
    """Time every shape `effort.rounds` times in turn, less what `partial` already holds."""
    manager = engine.tokenizer_manager
    shapes = effort.shapes(settings.gamma, settings.max_running_requests or MAX_REQUESTS, engine.max_total_tokens)
    if not shapes:
        raise RuntimeError(f"the KV cache of {engine.max_total_tokens} tokens holds no step to measure")
    times = Counter((point.requests, point.tokens, point.context) for point in partial.points)
    began, total = time.monotonic(), effort.rounds * len(shapes)
    await measure_shape(manager, shapes[0], effort.steps)  # warm
    for number in range(total):
        round_number, shape = number // len(shapes), shapes[number % len(shapes)]
        if effort.seconds is not None and time.monotonic() - began > effort.seconds:
            break
        if times[shape.requests, shape.requests * shape.tokens, shape.total_context(effort.steps)] <= round_number:
            for point in await measure_shape(manager, shape, effort.steps):
                partial.add(point)
        progress(Progress("step times", number + 1, total))


def built_in_questions() -> list[str]:
    """Code, math and chat in turn, ours."""
    return [sample.turns[0] for sample in read_samples(PROMPTS)]
