"""Ends a request with unservable values with an error; SGLang would end the engine, and with it all answers.

SGLang and our worker turn the options of requests into tensors of a whole batch, where one unfit value raises for all.
So each request is first prepared alone before it is queued, by the same code, on the CPU: under a tenth of a
millisecond without penalties. An error raised later is no request's fault and still ends the engine.
"""

import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..options import RequestOptions

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
LARGEST_BIAS = float(torch.finfo(torch.float32).max)


def register() -> None:
    HookRegistry.register(f"{SCHEDULER}.handle_generate_request", _handle, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}._add_request_to_queue", _add, HookType.AROUND)


def _handle(original: Callable[..., None], scheduler: Any, received: Any, **others: Any) -> None:
    """Refuse a request if its arrival raises. Its object and grammar are not shared yet."""
    try:
        original(scheduler, received, **others)
    except Exception as error:
        scheduler.waiting_queue[:] = [req for req in scheduler.waiting_queue if req.rid != received.rid]
        _refuse(scheduler, received, error)


def _add(original: Callable[..., None], scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    if not is_retracted and req.to_finish is None and req.finished_reason is None:
        try:
            prepare(req, scheduler.model_config.vocab_size, diffusion=scheduler.dllm_config is not None)
        except Exception as error:
            scheduler._release_aborted_request(req)
            _refuse(scheduler, req, error)
            return
    original(scheduler, req, is_retracted)


def prepare(req: Any, vocab_size: int, *, diffusion: bool = False) -> None:
    """Prepare a request alone, as in a batch; raises its errors there, and ValueError for values that fail later.
    req: SGLang's `Req`. diffusion: the model fills blocks, and our request table is not used."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from ..decode.requests import RequestTable

    _check(req, vocab_size)
    SamplingBatchInfo.from_schedule_batch(_Alone(req), vocab_size)
    RequestOptions.from_custom_params(req.sampling_params.custom_params).draft_limit(1)
    if not diffusion:
        RequestTable(1, 1, "cpu").admit([req], torch.zeros(1, dtype=torch.int64), np.zeros(1, dtype=np.int64))


class _Alone:
    """A batch of one request, as far as its sampling is concerned; SGLang keeps weak references to it."""

    device = "cpu"

    def __init__(self, req: Any):
        self.reqs = [req]


def _check(req: Any, vocab_size: int) -> None:
    """Raise ValueError for values that would raise only in the forward, or while answers are sent."""
    params = req.sampling_params
    if req.multimodal_inputs is None and req.input_embeds is None:
        if not len(req.origin_input_ids):
            raise ValueError("a prompt without tokens")
        _within("prompt token", req.origin_input_ids, vocab_size)
    _within("stop token", params.stop_token_ids, vocab_size)
    if req.return_logprob:
        _within("token with a logprob", req.logprob.token_ids_logprob, vocab_size)
        if not 0 <= (req.logprob.top_logprobs_num or 0) <= vocab_size:
            raise ValueError(f"{req.logprob.top_logprobs_num} top logprobs of a vocabulary of {vocab_size}")
    if params.stream_interval is not None and params.stream_interval < 1:
        raise ValueError(f"a stream interval of {params.stream_interval}")
    for bias in (params.logit_bias or {}).values():
        if not (math.isfinite(bias) and abs(bias) <= LARGEST_BIAS):
            raise ValueError(f"a logit bias of {bias}")


def _within(what: str, tokens: Any, vocab_size: int) -> None:
    if tokens is None or not len(tokens):
        return
    ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{what} outside the vocabulary of {vocab_size}")


def _refuse(scheduler: Any, req: Any, error: Exception) -> None:
    """End one request. req: SGLang's `Req`, or the message from the HTTP process."""
    from sglang.srt.managers.io_struct import AbortReq

    cause = (str(error).partition("\n")[0] or repr(error)).rstrip(".")
    message = f"the engine cannot prepare this request: {cause} ({type(error).__name__})"
    logger.error("%s, rid=%s", message, req.rid)
    reason = {"type": "abort", "status_code": HTTPStatus.INTERNAL_SERVER_ERROR, "message": message}
    scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=reason), req)
