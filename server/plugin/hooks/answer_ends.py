"""Ends of answers, judged as if every token had come in its own step.

SGLang judges the tokens that a step accepted as one run: it looks for the first stop *string of the list* anywhere in
the run, in a window that grows with it, before it looks for stop tokens. Text, matched stop and counts then depend on
how much of a draft was accepted. Here a run is judged token by token, by SGLang's own code.

Text released before the end depends on the run as well: the beginning of a stop string must be held back, and the end
is cut where the string first occurs. So a run is released as far as single tokens would have been. And if a run has
several characters before an incomplete one, SGLang's detokenizer sends some of them twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

REQUEST = "sglang.srt.managers.schedule_batch.Req"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"
PRINTABLE = "sglang.srt.managers.detokenizer_manager.find_printable_text"
REASONING_COUNTERS = ("update_reasoning_tokens", "update_self_opened_reasoning_tokens")
REASONING_STATE = ("reasoning_tokens", "_think_start_match_len", "_think_end_match_len", "_is_reasoning_over")
"""Fields of a request that these methods change."""
REPLACEMENT = "\ufffd"
"""Decoded text has it for bytes that are no character, or not yet one."""


def register() -> None:
    for name, hook in (
        ("update_finish_state", _judge),
        *((name, _reasoning_counter(name)) for name in REASONING_COUNTERS),
        ("update_spec_correct_drafts_histogram", _count_drafts),
    ):
        HookRegistry.register(f"{REQUEST}.{name}", hook, HookType.AROUND)
    HookRegistry.register(f"{STREAMER}._GenerationStreamAccumulator.accept", _release, HookType.AROUND)
    HookRegistry.register(f"{STREAMER}.SchedulerOutputStreamer.stream_output", _release_before_ends, HookType.AROUND)
    HookRegistry.register(PRINTABLE, _whole_characters, HookType.REPLACE)


# -- ends -------------------------------------------------------------------------------------------------------------


def _judge(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """Do `Req.update_finish_state` of a run: `new_accepted_len` tokens at the end of `output_ids`."""
    run = new_accepted_len
    if req.finished_reason is not None:
        return
    if run > 1 and not req.to_finish and _depends_on_run(req, run):
        _judge_each(original, req, run)
    else:
        original(req, run)
    if _may_stop_at_text(req):
        req.outrider_unreleased = getattr(req, "outrider_unreleased", 0) + run
    if req.finished_reason is not None:
        _forget_behind_end(req, run)
    req.outrider_drafts = 0


def _depends_on_run(req: Any, run: int) -> bool:
    """Return True if SGLang may judge a run differently from its tokens; a stop token wins over the length in both."""
    tokens = req.output_ids[-run:]
    return _may_stop_at_text(req) or min(tokens) < 0 or (req.vocab_size is not None and max(tokens) >= req.vocab_size)


def _may_stop_at_text(req: Any) -> bool:
    params = req.sampling_params
    return bool(params.stop_strs or params.stop_regex_strs)


def _judge_each(original: Callable[..., None], req: Any, run: int) -> None:
    grammar, length = req.grammar, len(req.output_ids)
    for end in range(length - run + 1, length + 1):
        req.grammar = grammar if end == length else None  # it has read the whole run, which ends where the grammar does
        try:
            with _up_to(req, end):
                original(req, 1)
        finally:
            req.grammar = grammar
        if req.finished_reason is not None:
            if req.finished_len is None:
                req.finished_len = end
            return


@contextmanager
def _up_to(req: Any, end: int) -> Iterator[None]:
    """Cut the request to its first `end` tokens; the rest is put back afterwards."""
    behind = req.output_ids[end:]
    del req.output_ids[end:]
    try:
        yield
    finally:
        req.output_ids.extend(behind)


# -- counts -----------------------------------------------------------------------------------------------------------


def _count_drafts(original: Callable[..., None], req: Any, num_correct_drafts: int) -> None:
    req.outrider_drafts = num_correct_drafts  # of this step
    original(req, num_correct_drafts)


def _reasoning_counter(name: str) -> Callable[..., None]:
    def count(original: Callable[..., None], req: Any, tokens: Any, *tags: Any) -> None:
        before = {field: getattr(req, field) for field in REASONING_STATE}
        original(req, tokens, *tags)
        req.outrider_reasoning = before, name, tags  # afterwards: one counter calls the other

    return count


def _forget_behind_end(req: Any, run: int) -> None:
    """Undo counts of a step's tokens that are not in the answer."""
    length = len(req.output_ids)
    end = length if req.finished_len is None else req.finished_len
    kept = max(run - (length - end), 0)
    drafts = getattr(req, "outrider_drafts", 0)
    if drafts > kept:
        histogram = req.spec_correct_drafts_histogram
        req.spec_num_correct_drafts -= drafts - kept
        histogram[drafts] -= 1
        histogram[kept] += 1
    if end < length and (counted := getattr(req, "outrider_reasoning", None)) is not None:
        before, name, tags = counted
        for field, value in before.items():
            setattr(req, field, value)
        getattr(req, name)(list(req.output_ids[length - run : end]), *tags)


# -- release of text --------------------------------------------------------------------------------------------------


def _release(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:
    """Send the text that single tokens would have sent by now, as SGLang decides at the run's last token that is not
    held back. Whole texts of requests with stop strings are sent when they end."""
    if req.finished() or not _may_stop_at_text(req):
        original(accumulator, req=req)
        return
    unreleased, req.outrider_unreleased = getattr(req, "outrider_unreleased", 1), 0
    if not req.stream:
        return
    sent, length = len(accumulator.rids), len(req.output_ids)
    for end in range(length, length - unreleased, -1):
        with _up_to(req, end):
            if _is_whole(req.tokenizer, req.output_ids[-1]) or not req.tail_str().endswith(REPLACEMENT):
                original(accumulator, req=req)
        if len(accumulator.rids) > sent:
            return


@lru_cache(maxsize=1 << 16)
def _is_whole(tokenizer: Any, token: int) -> bool:
    """Return True if text that ends with the token ends with a whole character, whatever comes before."""
    return not tokenizer.decode([token]).endswith(REPLACEMENT)


def _release_before_ends(
    original: Callable[..., None], streamer: Any, reqs: Any, return_logprob: bool, skip_req: Any = None
) -> None:
    """Before the ends of requests that ended within a run, send the text that single tokens would have sent by then."""
    for req in reqs:
        if req.finished_reason is None or req.finished_output or not req.stream:
            continue
        if getattr(req, "outrider_unreleased", 0) > 1:
            with _before_end(req):
                if req.outrider_unreleased > 0:
                    original(streamer, [req], return_logprob)
    original(streamer, reqs, return_logprob, skip_req)


@contextmanager
def _before_end(req: Any) -> Iterator[None]:
    """Reset the request to its state before the token that ended it."""
    reason, finished_len, length = req.finished_reason, req.finished_len, len(req.output_ids)
    end = (length if finished_len is None else finished_len) - 1
    req.outrider_unreleased -= length - end
    req.finished_reason = req.finished_len = None
    try:
        with _up_to(req, end):
            yield
    finally:
        req.finished_reason, req.finished_len = reason, finished_len


def _whole_characters(text: str) -> str:
    """Return the part of a text that can be sent: all but an incomplete character at its end. It only grows with the
    text. SGLang's own takes Chinese characters back when a letter follows, and sends them again."""
    return text.rstrip(REPLACEMENT)
