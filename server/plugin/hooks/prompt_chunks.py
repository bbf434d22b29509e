"""Has SGLang's scheduler read prompts in the chunks that `scheduler/pauses.py` chooses.

SGLang builds the batches. We set its `chunked_prefill_size` for each batch, sort its queue by turns, and bound the
tokens of the partly read prompt, so that shorter ones pass it (SGLang's policy `shortest-prefill-first`). Where a
decode step comes first, no prefill batch is built. Arrivals and aborts take effect between chunks, as between batches.

The first of several tensor-parallel ranks decides. Turns are counted in tokens, so all ranks have the same.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Self

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from outrider.scheduler.cost.prefill import PrefillCost, PrefillPoint, pairs_of
from outrider.scheduler.pauses import Pauses, Prompt, level_share, turn_of

from ..config import PluginConfig
from ..loading.from_profile import load_prefills
from ..measuring import REPLACED

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
SHORTEST_FIRST = "shortest-prefill-first"
MATCHED_FROM = 256
"""Shorter prompts are not looked up in the cache until they are read."""
MOST_MATCHED = 128
"""Prompts looked up for their order."""
MATCHED = "outrider_matched"
"""Attribute of SGLang's request: prompt tokens read by the server when the request was looked up."""
READER = "outrider_prompts"
"""Attribute of SGLang's scheduler, and of its policy: the `PromptReader`, or None."""
DECODE_FIRST, AS_CONFIGURED = -1, 0
"""Special values in place of a number of tokens: a decode step first, and SGLang's own chunk."""


def register() -> None:
    HookRegistry.register(f"{SCHEDULER}._get_new_batch_prefill_raw", _build, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.process_batch_result", _observe, HookType.AFTER)
    HookRegistry.register(f"{POLICY}._validate_and_adjust_policy", _in_order_of_arrival, HookType.AROUND)
    HookRegistry.register(f"{POLICY}.calc_priority", _sort, HookType.AROUND)
    HookRegistry.register(f"{POLICY}.shortest_prefill_chunk_limit", _limit, HookType.AROUND)


def _build(original: Callable[..., Any], scheduler: Any, *, running_batch: Any, **options: Any) -> Any:
    if not hasattr(scheduler, READER):
        reader = PromptReader.of(scheduler)
        setattr(scheduler, READER, reader)
        setattr(scheduler.policy, READER, reader)
    reader = getattr(scheduler, READER)
    if reader is None:
        return original(scheduler, running_batch=running_batch, **options)
    tokens = reader.choose(running_batch)
    if tokens == DECODE_FIRST:
        batch = None
    else:
        configured = scheduler.chunked_prefill_size
        scheduler.chunked_prefill_size = min(tokens or configured, configured)
        try:
            batch, running_batch = original(scheduler, running_batch=running_batch, **options)
        finally:
            scheduler.chunked_prefill_size = configured
    reader.optional.run("prompts", None, reader.launched, batch)
    return batch, running_batch


def _observe(returned: Any, scheduler: Any, batch: Any, result: Any) -> None:
    if (reader := getattr(scheduler, READER, None)) is not None:
        reader.optional.run("prompts", None, reader.observe, batch)


def _in_order_of_arrival(original: Callable[..., Any], policy: Any, name: str, tree_cache: Any) -> Any:
    """Use "fcfs" without shared prefixes, where SGLang refuses to read short prompts first."""
    alone = getattr(tree_cache, "disable", True) and name == SHORTEST_FIRST
    return original(policy, "fcfs" if alone else name, tree_cache)


def _sort(
    original: Callable[..., None], policy: Any, waiting: list[Any], running_batch: Any = None, processed_tokens: int = 0
) -> None:
    """Sort by turns. SGLang would look up every prompt of the queue in the cache."""
    if policy.policy.value != SHORTEST_FIRST:
        original(policy, waiting, running_batch, processed_tokens)
    elif len(waiting) > 1:
        waiting.sort(key=_turn)


def _limit(
    original: Callable[..., int | None], policy: Any, unfinished: Any, waiting: Any, budget: int, page_size: int
) -> int | None:
    reader = getattr(policy, READER, None)
    return original(policy, unfinished, waiting, budget, page_size) if reader is None else reader.limit


def _turn(req: Any) -> float:
    return turn_of(req.arrival_processed_tokens, _tokens(req) - req.num_matched_prefix_tokens)


def _tokens(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


class PromptReader:
    """Chooses the chunks of one scheduler. limit: most tokens of the partly read prompt in the next forward.
    answering: the running batch decodes."""

    def __init__(self, scheduler: Any, pauses: Pauses):
        self.scheduler, self.pauses = scheduler, pauses
        self.worker = scheduler.draft_worker
        self.optional = self.worker.optional
        self.limit: int | None = None
        self.answering = False
        self._level_share = 0.0
        # A result comes after its own pass through `choose`, or after the next one's where steps overlap.
        self._passes: deque[float] = deque(maxlen=2 if scheduler.enable_overlap else 1)
        self._ended = self._resumed = 0.0

    @classmethod
    def of(cls, scheduler: Any) -> Self | None:
        """Return the reader; None if SGLang cuts prompts as configured."""
        config = PluginConfig.from_env()
        if not config.max_pause or scheduler.chunked_prefill_size is None or scheduler.is_mixed_chunk:
            return None
        in_turn = scheduler.policy.policy.value == SHORTEST_FIRST
        cost = PrefillCost(load_prefills(config))
        page = scheduler.truncation_align_size or scheduler.page_size  # SGLang cuts prompts at multiples of it
        return cls(scheduler, Pauses(config.max_pause, cost, page, in_turn=in_turn))

    def choose(self, running_batch: Any) -> int:
        """Return the tokens that the next forward reads, AS_CONFIGURED or DECODE_FIRST."""
        self._passes.append(time.monotonic())
        self.limit, self._level_share = None, 0.0
        scheduler, waiting, worker = self.scheduler, self.scheduler.waiting_queue, self.worker
        self.answering = not (running_batch.is_empty() or running_batch.is_prefill_only)
        if not self.answering:
            self._resumed = 0.0
        if REPLACED in vars(worker):  # requests of a measurement begin together
            return AS_CONFIGURED
        if scheduler.chunked_req is None and not scheduler.grammar_manager.has_waiting_grammars():
            full = running_batch.batch_is_full and self.answering
            if not waiting or (full and not (scheduler.enable_priority_preemption or scheduler.is_hybrid_swa)):
                return AS_CONFIGURED
        if self.pauses.in_turn and waiting:
            self._sort(waiting)
        decided = AS_CONFIGURED, 0
        if worker.ranks.decides:
            decided = self.optional.run("prompts", decided, self._decide, waiting[:MOST_MATCHED], running_batch)
        tokens, limit = worker.ranks.agree(decided)
        self.limit = limit or None
        return tokens

    def _sort(self, waiting: list[Any]) -> None:
        """Sort by turns. A prompt is looked up in the cache again after each chunk."""
        from sglang.srt.mem_cache.common import match_kv_cache

        read = self.scheduler.processed_tokens_counter
        for req in waiting[:MOST_MATCHED]:
            if _tokens(req) >= MATCHED_FROM and getattr(req, MATCHED, None) != read:
                match_kv_cache(req, self.scheduler.tree_cache)
                setattr(req, MATCHED, read)
        waiting.sort(key=_turn)

    def _decide(self, waiting: Sequence[Any], running_batch: Any) -> tuple[int, int]:
        """Return tokens as `choose` does, and the most tokens of the partly read prompt; 0: all."""
        scheduler, pauses, begun = self.scheduler, self.pauses, None
        queue = [
            Prompt(_tokens(req) - req.num_matched_prefix_tokens, req.num_matched_prefix_tokens, _turn(req))
            for req in waiting
        ]
        if (req := scheduler.chunked_req) is not None:
            left = _tokens(req) - req.extend_end
            begun = Prompt(left, req.extend_end, turn_of(req.arrival_processed_tokens, left))
            # A partly read prompt is not retracted: decode steps and other prompts leave room for it in the cache.
            room = self._free() - left - 2 * (running_batch.new_tokens_required_next_decode() if self.answering else 0)
            if room < 0:
                return AS_CONFIGURED, 0
            # A new request locks the prefix that it shares, and its first decode steps take slots as well.
            needs = accumulate(prompt.tokens + prompt.context + 4 * self.worker.width for prompt in queue)
            queue = [prompt for prompt, total in zip(queue, needs, strict=True) if total <= room]
        if not pauses.cost.known:
            return AS_CONFIGURED, 0
        if self.answering:
            self._level_share = self._share_of_levels(running_batch)
        chunk = pauses.choose(queue, begun, answering=self.answering)
        return (DECODE_FIRST, 0) if chunk is None else (chunk.tokens, chunk.unfinished or 0)

    def _free(self) -> int:
        """Return the free tokens of the cache."""
        scheduler = self.scheduler
        return int(scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size())

    def _share_of_levels(self, running_batch: Any) -> float:
        levels = self.worker.requests.levels[running_batch.req_pool_indices_cpu.numpy()]
        if not levels.any():
            return 0.0
        metrics = self.worker.planning.metrics
        tokens = metrics.accepted_length.total / max(metrics.request_steps.total, 1)
        return level_share(levels, max(tokens, 1.0) / self.pauses.step)

    def launched(self, batch: Any) -> None:
        """Record that SGLang runs `batch` of prompts; None: a decode step, if it can."""
        if batch is None:
            self.pauses.stepped()
        else:
            seconds, long = self.pauses.cost.seconds(*_size(batch)), batch.chunked_req is not None
            now = self.answering
            self.pauses.launch(seconds * now, long=long and now, level_share=self._level_share)

    def observe(self, batch: Any) -> None:
        """Record a finished batch."""
        now = time.monotonic()
        seconds, self._ended = now - max(self._ended, self._passes[0]), now
        planning = getattr(self.worker, "planning", None)  # the first rank's
        if batch.forward_mode.is_extend():
            tokens, pairs = _size(batch)
            self.pauses.observe_chunk(tokens, pairs, seconds)
            if planning is not None:
                planning.metrics.observe_prefill(tokens, seconds)
                if len(batch.reqs) == 1:
                    planning.recording.prefills.append(PrefillPoint(tokens, batch.prefix_lens[0], seconds))
        elif batch.forward_mode.is_decode():
            self.pauses.observe_step(seconds)
            if planning is not None and self._resumed:
                planning.metrics.stream_pauses.observe(now - self._resumed)
            self._resumed = now


def _size(batch: Any) -> tuple[int, float]:
    """Return the tokens of prompts that a batch reads, and their pairs."""
    return sum(batch.extend_lens), pairs_of(batch.extend_lens, batch.prefix_lens)
