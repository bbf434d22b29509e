"""Measures the step costs of a running engine and the accuracy of its drafter's confidences.

Steps of exact shapes: R requests with drafts as equal in length as possible. The worker times from one decode step to
    the next, so scheduling and process hops are part of the cost. Confidences: answers to a mixed set of prompts, every
    draft verified; a part of the prompts is held out to judge the calibration.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial as partial_of
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import numpy as np

from outrider.profiles.store import Profile
from outrider.scheduler.calibration.fit import fit_table
from outrider.scheduler.calibration.records import Records
from outrider.scheduler.cost.step_times import Point

from ..plugin import worker_rpc
from ..plugin.options import RequestOptions
from ..processes import client
from ..prompt_files import BUILT_IN, read_questions, with_temperatures
from . import diffusion, result
from .effort import MARGIN_STEPS, QUICK, QUICK_ON_GPU, Effort, Shape
from .grid import CONCURRENCY, Progress, Run, answer_all, capacity_of, measure_grid, merge_refined, prompt_of
from .idle import run_now
from .prefill import measure_prefills
from .report import Tuned, TunedGraphs

if TYPE_CHECKING:
    from ..processes.engine import Engine
    from ..settings.resolve import Resolved

T = TypeVar("T")

NO_RECORDS: dict[str, list[Any]] = {"confidence": [], "verify_lens": [], "accepted": [], "classes": []}
DRAFT_STEPS = 3
"""Drafts for the same number of requests that make a meaningful median."""
LEAST_DRAFT = 1e-6
"""Seconds of a draft that other work hides."""


async def measure_shape(manager: Any, shape: Shape, steps: int) -> list[Point]:
    """Run `shape.requests` requests and return median times of their steps without drafting and of their drafts; [] if
    no step had exactly this shape, because the engine was in use."""
    drafted = [shape.drafted(index) for index in range(shape.requests)]
    options = [RequestOptions(enabled=n > 0, gamma=n, planned=False).to_custom_params() for n in drafted]
    vocabulary = manager.model_config.vocab_size
    prompts = [prompt_of(index, shape.context, vocabulary) for index in range(shape.requests)]
    async with worker_rpc.measuring(manager):
        await client.run_beside(manager, prompts, steps + MARGIN_STEPS, options)
        return _points((await worker_rpc.read(manager))["steps"], shape, shape.total_context(steps))


def _points(log: dict[str, list[Any]], shape: Shape, context: float) -> list[Point]:
    shapes = zip(log["requests"], log["tokens"], strict=True)
    exact = [i for i, step_shape in enumerate(shapes) if step_shape == (shape.requests, shape.tokens)][1:]
    if not exact:
        return []
    seconds, drafted = log["seconds"], log["draft_seconds"]
    # A GPU measures no drafts: every other step runs without one, and the difference is the time of a draft.
    steps = [seconds[i] - drafted[i] for i in exact if drafted[i] is not None]
    if not steps:
        return []
    step = statistics.median(steps)
    points = [Point(shape.requests, shape.tokens, context, (step,))]
    # By the number of requests that the model drafted for: where text repeats itself, lookup drafts instead.
    drafts: dict[int, list[float]] = {}
    for i in exact:
        drafts.setdefault(log["drafting"][i], []).append(seconds[i] - step if drafted[i] is None else drafted[i])
    for drafting, times in drafts.items():
        if drafting and len(times) >= DRAFT_STEPS:
            tokens = context * drafting / shape.requests
            points.append(Point(drafting, 0, tokens, (max(statistics.median(times), LEAST_DRAFT),)))
    return points


async def record_answers(
    engine: Engine, questions: Sequence[tuple[str, float]], new_tokens: int, gamma: int
) -> Records:
    """Answer every question at temperature 0, at its own, and at its own with a seed, with all drafts verified. Returns
    the worker's records."""
    manager = engine.tokenizer_manager
    await worker_rpc.command(manager, worker_rpc.FORGET)
    gate = asyncio.Semaphore(CONCURRENCY)
    options = RequestOptions(planned=False).to_custom_params()

    async def ask(question: str, temperature: float, seed: int | None = None) -> None:
        async with gate:
            await client.answer(
                engine, question, new_tokens, temperature=temperature, sampling_seed=seed, custom_params=options
            )

    greedy = [ask(question, 0.0) for question, _ in questions]
    sampled = [ask(question, temperature) for question, temperature in questions]
    seeded = [ask(question, temperature, crc32(question.encode())) for question, temperature in questions]
    await asyncio.gather(*greedy, *sampled, *seeded)
    return to_records((await worker_rpc.read(manager))["records"], gamma)


def to_records(lists: dict[str, list[Any]], gamma: int) -> Records:
    """Return records from `worker_rpc.read` as arrays, with the first `gamma` tokens of longer drafts."""
    rows = [row[:gamma] for row in lists["confidence"]]
    return Records(
        confidence=np.asarray(rows, dtype=np.float64).reshape(-1, gamma),
        verify_lens=np.minimum(np.asarray(lists["verify_lens"], dtype=np.int64), gamma),
        accepted=np.minimum(np.asarray(lists["accepted"], dtype=np.int64), gamma),
        classes=np.asarray(lists["classes"], dtype=np.int64),
    )


def split(questions: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield two thirds to fit on, and one third held out: one of every three neighbours, which are often alike.

    Its place moves from one three to the next. So kinds of prompts that alternate, as the built-in ones do, have equal
    shares of both parts.
    """
    held_out = {i for i in range(len(questions)) if (i + i // 3) % 3 == 2}
    yield [q for i, q in enumerate(questions) if i not in held_out]
    yield [q for i, q in enumerate(questions) if i in held_out]


async def tune(
    engine: Engine,
    resolved: Resolved,
    effort: Effort,
    *,
    questions: Sequence[str] | None = None,
    how: str = "at start",
    progress: Progress = lambda what, done, total: None,
    refined: Profile | None = None,
    run: Run = run_now,
) -> Tuned | TunedGraphs:
    """Measure an engine, write the profile to the folder `resolved.settings.profile` and have the engine plan by it.

    Step times are saved as they come, next to that folder, and a later call continues from them.
    refined: the profile that is replaced; its points for other numbers of requests are kept, and half of the KV cache
        is left to users.
    run: runs each piece, of a few seconds. Raises RuntimeError if no step could be measured.
    """
    settings, manager = resolved.settings, engine.tokenizer_manager
    if settings.parallel.role:
        raise RuntimeError("a server that does both, prefill and decode, measures their profile")
    if settings.diffusion is not None:
        return await diffusion.tune(engine, resolved, effort, questions, how, progress, refined, run)
    prompts = list(questions or read_questions(BUILT_IN))[: effort.prompts]
    partial = result.begin(resolved)
    capacity = capacity_of(engine, settings.max_running_requests, refined)
    buckets = (await worker_rpc.read(manager))["buckets"]
    shapes = effort.shapes(settings.gamma, settings.plugin_config.longest, capacity, buckets)
    points = await measure_grid(manager, shapes, measure_shape, effort, partial, progress, run)
    if refined is not None:
        points = merge_refined(points, refined.points)
    prefills = await measure_prefills(manager, capacity.context // 2, effort.prefill_seconds, run)
    record = partial_of(record_answers, engine, new_tokens=effort.new_tokens, gamma=settings.gamma)
    none = to_records(NO_RECORDS, settings.gamma)
    parts = []
    for part, share in zip(split(with_temperatures(prompts)), (2 / 3, 1 / 3), strict=True):
        seconds = None if effort.answer_seconds is None else effort.answer_seconds * share
        parts.append(Records.concatenate([none, *await answer_all(part, record, seconds, progress, run)]))
    dataset = f"{len(prompts)} prompts, greedy and sampled"
    calibration = fit_table(*parts, dataset=dataset, verification=settings.verification)
    fitted = calibration.to_json()
    saved = result.write(resolved, points, effort, how, calibration=fitted, prefills=prefills, refined=refined)
    partial.discard()
    await worker_rpc.command(manager, worker_rpc.RELOAD)
    return Tuned(saved, calibration, len(parts[1]))


async def measure_first(engine: Engine, resolved: Resolved, say: Callable[[str], None]) -> None:
    """Measure a quick profile if none fits, and plan by it; an engine that cannot be measured runs without."""
    if not (resolved.unmeasured and resolved.settings.tune):
        return
    say("No profile fits this engine: measuring a quick one (once; `outrider tune` measures a thorough one)")
    try:
        on_cpu = resolved.settings.resolved_device == "cpu"
        tuned = await tune(engine, resolved, QUICK if on_cpu else QUICK_ON_GPU)
    except (OSError, ValueError, RuntimeError) as error:
        without = "costs are learnt as it serves" if resolved.settings.diffusion else "every draft is verified"
        say(f"Not measured ({error}); {without}")
    else:
        say(f"Profile {tuned.profile.name}: {tuned.summary}")
