"""Measures what a running engine's steps cost and how well its drafter's confidences hold.

Steps of exact shapes: R requests whose drafts are filled up to the same length, timed inside the worker from one decode
step to the next, so that scheduling and process hops are part of the cost. Confidences: answers to a mixed set of
prompts, every draft verified; a part of the prompts is held out to judge the calibration.
"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import outrider.profiles
from outrider.drafters.training.prompts import read_samples
from outrider.profiles import store
from outrider.profiles.measurement_log import PartialMeasurement
from outrider.profiles.plots import plot_steps_per_second
from outrider.profiles.store import Profile
from outrider.scheduler.calibration.fit import fit_joint, fit_sts
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.plot import plot_reliability
from outrider.scheduler.calibration.records import Records
from outrider.scheduler.cost.step_times import Point, merge
from outrider.server import pictures
from outrider.server.engine import client, profile_lookup
from outrider.server.engine.settings import Settings
from outrider.server.plugin import control
from outrider.server.plugin.options import RequestOptions

if TYPE_CHECKING:
    from outrider.server.engine.engine import Engine
    from outrider.server.engine.resolve import Resolved

PROMPTS = Path(outrider.profiles.__file__).parent / "prompts.jsonl"
CONCURRENCY = 8
"""Answers written at a time for the calibration."""
MAX_REQUESTS = 64
"""More than any grid measures, for servers without a limit of their own."""

MARGIN_STEPS = 3
"""Steps of each request beyond those that are timed: while requests join, and until the last one has begun."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """requests: R. tokens: verified per request and step, the anchor included. context: prompt tokens per request."""

    requests: int
    tokens: int
    context: int

    def total_context(self, steps: int) -> float:
        """Cached tokens of all requests together, in the middle of `steps` steps."""
        return float(self.requests * (self.context + steps // 2))


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly to measure.

    steps: timed per shape and round. prompts, new_tokens: of the answers that the calibration is fitted on, at
    temperature 0 and 1 each. seconds: stop measuring shapes after that long; None for no limit.
    """

    requests: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    tokens: tuple[int, ...] | None = None
    contexts: tuple[int, ...] = (128, 1024)
    steps: int = 10
    rounds: int = 3
    prompts: int = 144
    new_tokens: int = 128
    seconds: float | None = None

    def shapes(self, gamma: int, max_requests: int, max_total_tokens: int) -> list[Shape]:
        """What fits the engine, small shapes first, so that a run that is cut short has measured something of each."""
        tokens = self.tokens or tuple(range(1, gamma + 2))
        room = (gamma + 1) * 2 + self.steps + MARGIN_STEPS
        return [
            Shape(requests, count, context)
            for context in self.contexts
            for requests in self.requests
            for count in tokens
            if count <= gamma + 1 and requests <= max_requests and requests * (context + room) <= max_total_tokens
        ]


QUICK = Effort(
    requests=(1, 4, 16),
    tokens=(1, 2, 4, 8),
    contexts=(128,),
    steps=6,
    rounds=1,
    prompts=16,
    new_tokens=48,
    seconds=20.0,
)
"""For a server that starts without a profile: well under a minute on two cores with the embedded model."""


async def measure_shape(manager: Any, shape: Shape, steps: int) -> list[Point]:
    """Run `shape.requests` requests and time their steps: the step without drafting and, where they draft, the draft.

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
    draft = statistics.median(log["draft_seconds"][i] for i in exact)
    step = statistics.median(log["seconds"][i] - log["draft_seconds"][i] for i in exact)
    points = [Point(shape.requests, count, context, (step,))]
    if shape.tokens > 1:
        points.append(Point(shape.requests, 0, context, (draft,), drafted=True))
    return points


async def record_answers(
    manager: Any,
    questions: Sequence[str],
    *,
    new_tokens: int,
    concurrency: int,
    context_length: int,
    progress: Callable[[int], None],
) -> Records:
    """Answer every question at temperature 0 and 1 with all drafts verified; what the worker recorded."""
    await control.command(manager, control.FORGET)
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
            progress(done)

    await asyncio.gather(*(ask(question, temperature) for temperature in (0.0, 1.0) for question in questions))
    return to_records((await control.read(manager))["records"])


def to_records(lists: dict[str, list[Any]]) -> Records:
    """What `state.read` brought, as arrays."""
    return Records(
        confidence=np.asarray(lists["confidence"], dtype=np.float64),
        verify_lens=np.asarray(lists["verify_lens"], dtype=np.int64),
        accepted=np.asarray(lists["accepted"], dtype=np.int64),
        temperatures=np.asarray(lists["temperatures"], dtype=np.float64),
    )


def split(questions: Sequence[str]) -> Iterator[Sequence[str]]:
    """Two thirds to fit on, one third held out; neighbours in the file, which are often alike, go to both."""
    held_out = set(range(2, len(questions), 3))
    yield [q for i, q in enumerate(questions) if i not in held_out]
    yield [q for i, q in enumerate(questions) if i in held_out]


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured profile with what the calibration was judged on."""

    profile: Profile
    calibration: Calibration
    held_out: Records

    @property
    def summary(self) -> str:
        """One line for people."""
        before, after = (
            statistics.mean(errors) for errors in (self.calibration.ece_before, self.calibration.ece_after)
        )
        return (
            f"{len(self.profile.points)} step times, calibration error {before:.1%} before, {after:.1%} after "
            f"({self.calibration.method})"
        )

    def table(self) -> str:
        """Step times by shape, and the calibration by position."""
        times = {(p.requests, p.tokens, p.context): p for p in self.profile.points if not p.drafted}
        lines = [f"{'requests':>8} {'tokens':>7} {'context':>8} {'step ms':>8} {'spread':>7} {'draft ms':>9}"]
        cost = self.profile.cost()
        for (requests, tokens, context), point in times.items():
            draft = f"{cost.draft_seconds(requests) * 1e3:9.1f}"
            lines.append(
                f"{requests:>8} {tokens:>7} {context:>8.0f} {point.median * 1e3:8.1f} {point.spread:7.0%} {draft}"
            )
        c = self.calibration
        lines += ["", f"{'position':>8} {'temperature':>12} {'shift':>6} {'ECE before':>11} {'after':>6} {'AUC':>6}"]
        for k in range(c.gamma):
            area = "-" if c.auc[k] is None else f"{c.auc[k]:.3f}"
            lines.append(
                f"{k + 1:>8} {c.temperatures[k]:12.2f} {c.shifts[k]:6.2f} {c.ece_before[k]:11.1%}"
                f" {c.ece_after[k]:6.1%} {area:>6}"
            )
        lines.append(f"{c.method}, judged on {len(self.held_out)} drafts to prompts held out")
        return "\n".join(lines)

    def draw(self, folder: Path) -> None:
        """Save steps-per-second.png and reliability.png; needs matplotlib."""
        folder.mkdir(parents=True, exist_ok=True)
        with pictures.figure(folder / "steps-per-second.png") as figure:
            plot_steps_per_second(self.profile.cost(), figure)
        with pictures.figure(folder / "reliability.png") as figure:
            plot_reliability(self.held_out, self.calibration, figure)


Progress = Callable[[str, int, int], None]
"""What is being done, units done, units in all."""


def no_progress(what: str, done: int, total: int) -> None:
    """Say nothing."""


async def tune(
    engine: Engine,
    resolved: Resolved,
    effort: Effort,
    *,
    questions: Sequence[str] | None = None,
    how: str = "at start",
    progress: Progress = no_progress,
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
    for part in split(asked):
        note = functools.partial(_note_answers, progress, 2 * len(part))
        parts.append(
            await record_answers(
                manager,
                part,
                new_tokens=effort.new_tokens,
                concurrency=CONCURRENCY,
                context_length=engine.context_length,
                progress=note,
            )
        )
    calibration = calibrate(*parts, dataset=f"{len(asked)} prompts at temperatures 0 and 1")
    profile = Profile(
        name=folder.name,
        fingerprint=here,
        points=tuple(merge(partial.points)),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        measured_how=how,
    )
    saved = store.save(profile, folder.parent, json.loads(calibration.to_json()))
    partial.discard()
    await control.command(manager, control.RELOAD)
    return Tuned(saved, calibration, parts[1])


def _note_answers(progress: Progress, total: int, done: int) -> None:
    progress("answers", done, total)


async def _measure_grid(
    engine: Engine, settings: Settings, effort: Effort, partial: PartialMeasurement, progress: Progress
) -> None:
    """Time every shape `effort.rounds` times in turn, less what `partial` already holds."""
    manager = engine.tokenizer_manager
    shapes = effort.shapes(settings.gamma, settings.max_running_requests or MAX_REQUESTS, engine.max_total_tokens)
    times: dict[tuple[int, int, float], int] = {}
    for point in partial.points:
        times[point.requests, point.tokens, point.context] = (
            times.get((point.requests, point.tokens, point.context), 0) + 1
        )
    began, total = time.monotonic(), effort.rounds * len(shapes)
    await measure_shape(manager, shapes[0], effort.steps)  # warm
    for number in range(total):
        round_number, shape = number // len(shapes), shapes[number % len(shapes)]
        if effort.seconds is not None and time.monotonic() - began > effort.seconds:
            break
        if (
            times.get((shape.requests, shape.requests * shape.tokens, shape.total_context(effort.steps)), 0)
            <= round_number
        ):
            for point in await measure_shape(manager, shape, effort.steps):
                partial.add(point)
        progress("step times", number + 1, total)


def calibrate(fitted_on: Records, held_out: Records, *, dataset: str) -> Calibration:
    """The better of both fits by calibration error on the prompts held out."""
    fits = [fit(fitted_on, dataset=dataset, held_out=held_out) for fit in (fit_sts, fit_joint)]
    return min(fits, key=lambda fit: statistics.mean(fit.ece_after))


def built_in_questions() -> list[str]:
    """Code, math and chat in turn, ours."""
    return [sample.turns[0] for sample in read_samples(PROMPTS)]
