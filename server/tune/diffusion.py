"""Measures a block-diffusion model: the costs of its rounds, and which states are worth a draft.

Rounds of exact shapes: R requests, each of which has the same number of states in every forward. Draft graphs: base
    decoding of a mixed set of prompts, greedy and sampled, counts how often states follow each other (Spiffy, algorithm
    2).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from typing import TYPE_CHECKING, Any
from zlib import crc32

from outrider.profiles import draft_graphs
from outrider.profiles.draft_graphs import TEMPERATURES
from outrider.profiles.store import Profile
from outrider.scheduler.cost.step_times import Point
from outrider.scheduler.spiffy.calibration import NODES, NodeCounts, choose, untuned_graph

from ..plugin import worker_rpc
from ..plugin.options import RequestOptions
from ..processes import client
from ..prompt_files import BUILT_IN, read_questions, with_temperatures
from ..settings.memory import REQUESTS
from ..settings.profile_lookup import graph_fingerprint
from ..settings.settings import Settings
from . import result
from .effort import MARGIN_STEPS, Capacity, Effort, Shape
from .grid import Progress, Run, answer_all, capacity_of, measure_grid, merge_refined, prompt_of
from .report import TunedGraphs

if TYPE_CHECKING:
    from ..processes.engine import Engine
    from ..settings.resolve import Resolved

PROMPTS = 50
"""Most prompts that are replayed."""
STATES = (1, 2, 3, 4, 6, NODES + 1)
"""States per request in a forward, including the block before if the forward holds it."""
MOST_ROWS = 128
"""Most states in a forward. Beyond, drafts do not pay."""
STEP_TOKENS = 4
"""Most tokens that a step by threshold usually reveals; the length of measured answers follows from it."""


async def tune(
    engine: Engine,
    resolved: Resolved,
    effort: Effort,
    questions: Sequence[str] | None,
    how: str,
    progress: Progress,
    refined: Profile | None,
    run: Run,
) -> TunedGraphs:
    """Measure a block-diffusion model; arguments and errors as `measure.tune`."""
    settings, manager = resolved.settings, engine.tokenizer_manager
    partial = result.begin(resolved)
    rounds = Rounds.of(settings, manager.model_config.vocab_size)
    shapes = rounds.shapes(effort, capacity_of(engine, settings.max_running_requests or REQUESTS, refined))
    points = await measure_grid(manager, shapes, rounds.measure, effort, partial, progress, run)
    if refined is not None:
        points = merge_refined(points, refined.points)
    prompts = with_temperatures(list(questions or read_questions(BUILT_IN))[: min(effort.prompts, PROMPTS)])
    counts = {name: NodeCounts() for name in TEMPERATURES}
    count = partial_of(replay, engine, new_tokens=effort.new_tokens)
    for counted in await answer_all(prompts, count, effort.answer_seconds, progress, run):
        for name, each in counted.items():
            counts[name].update(each)
    step_tokens = settings.plugin_config.step_tokens
    untuned = untuned_graph(rounds.block, step_tokens)
    graphs = {name: choose(each, NODES, step_tokens) if each.nodes else untuned for name, each in counts.items()}
    written = [
        draft_graphs.to_json(graph, graph_fingerprint(settings, resolved.model, name)) for name, graph in graphs.items()
    ]
    saved = result.write(resolved, points, effort, how, graphs=written, refined=refined)
    partial.discard()
    await worker_rpc.command(manager, worker_rpc.RELOAD)
    return TunedGraphs(saved, rounds.block, graphs, untuned, counts)


async def replay(engine: Engine, questions: Sequence[tuple[str, float]], new_tokens: int) -> Mapping[str, NodeCounts]:
    """Answer every question by base decoding, at temperature 0 and at its own; return the counts by class."""
    manager = engine.tokenizer_manager
    await worker_rpc.command(manager, worker_rpc.FORGET)
    options = RequestOptions(gamma=0, planned=False, replayed=True).to_custom_params()

    ask = partial_of(client.answer, engine, new_tokens=new_tokens, custom_params=options)
    for turn in ([(question, 0.0) for question, _ in questions], questions):
        await asyncio.gather(*(ask(q, temperature=each, sampling_seed=crc32(q.encode())) for q, each in turn))
    counts = (await worker_rpc.read(manager))["counts"]
    return {name: NodeCounts.from_json(counts[name]) for name in TEMPERATURES}


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of exact shapes, with the tokens of all states in a forward. block: tokens of a block. mask: the token
    that no prompt may hold. step: tokens that a step reveals. vocabulary: its size."""

    block: int
    mask: int
    step: int
    vocabulary: int

    @classmethod
    def of(cls, settings: Settings, vocabulary: int) -> Rounds:
        target = settings.diffusion
        assert target is not None
        step = settings.plugin_config.step_tokens or min(target.block_size, STEP_TOKENS)
        return cls(target.block_size, target.mask_token_id, step, vocabulary)

    def shapes(self, effort: Effort, capacity: Capacity) -> list[Shape]:
        """Return shapes that fit the engine, in the order of the fields; raises RuntimeError if none does."""
        each = effort.tokens or STATES
        behind = self._answer(effort.steps) + self.block  # drafts have their own slots for the open block's positions
        shapes = [
            Shape(requests, requests * states * self.block, context)
            for context in capacity.prompts(effort.contexts, behind)
            for requests in effort.requests
            for states in each
            if requests * states <= MOST_ROWS and capacity.holds(requests, context + behind + states * self.block)
        ]
        if not shapes:
            raise capacity.nothing_fits("round")
        return shapes

    def _answer(self, steps: int) -> int:
        """Return the tokens of an answer that takes `steps` and some more."""
        return (steps + MARGIN_STEPS) * self.step

    async def measure(self, manager: Any, shape: Shape, steps: int) -> list[Point]:
        """Run `shape.requests` requests; return the median time of their rounds of this shape, [] for fewer than two.
        For one state each the rounds with the fewest states count: all may also hold the blocks before."""
        states = shape.tokens // (shape.requests * self.block)
        options = RequestOptions(gamma=states - 1, planned=False).to_custom_params()
        async with worker_rpc.measuring(manager):
            prompts = [self._prompt(index, shape.context) for index in range(shape.requests)]
            await client.run_beside(manager, prompts, self._answer(steps), [options] * shape.requests)
            log = (await worker_rpc.read(manager))["rounds"]
        times: dict[int, list[float]] = {}
        for requests, rows, seconds in log:
            if requests == shape.requests:
                times.setdefault(rows, []).append(seconds)
        rows = min(times, default=0) if states == 1 else shape.requests * states
        if len(times.get(rows, ())) < 2:
            return []
        middle = statistics.median(times[rows][1:])
        return [Point(shape.requests, rows * self.block, shape.total_context(steps), (middle,))]

    def _prompt(self, index: int, length: int) -> list[int]:
        """Return the prompt of a request, without masks."""
        drawn = prompt_of(index, length, self.vocabulary)
        return [token - 1 if token == self.mask else token for token in drawn]
