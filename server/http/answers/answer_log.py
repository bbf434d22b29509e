"""Metrics and log fields of a whole answer: its time per token, and whether it met its service level.

SGLang's tokenizer manager passes every finished answer, streamed or not, to its request logger, with the scheduler's
times. Metrics count only answers that a user received: SGLang does not pass an answer cut off by its client, and an
aborted one is only logged.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.utils.request_logger import RequestLogger

from ...plugin.options import RequestOptions
from .. import request_middleware
from ..keys import admission
from ..metrics import AnswerMetrics


class AnswerLogger(RequestLogger):
    """Replaces SGLang's request logger; SGLang's flags for it keep working.

    tokenizer: of the model. content: put prompts and answers into the request's log line.
    """

    def __init__(self, original: RequestLogger, tokenizer: Any, content: bool) -> None:
        self.__dict__.update(vars(original))
        self._answers = AnswerMetrics()
        self._tokenizer, self._content = tokenizer, content

    @property
    def levels(self) -> dict[str, int]:
        """Number of whole answers that met, and missed, their service level."""
        return {"met": self._answers.reached[True], "missed": self._answers.reached[False]}

    def log_finished_request(self, obj: Any, out: Any, request: Any = None) -> None:
        super().log_finished_request(obj, out, request)
        meta = out["meta_info"]
        reason = meta.get("finish_reason") or {}
        self._count(obj, meta, reason)
        if not obj.log_metrics or reason.get("length") == 0:
            return  # our own measurement, or a prompt that SGLang reads once for several choices
        finish = reason.get("type")
        timing = Timing(meta)
        if finish != "abort":
            options = RequestOptions.from_custom_params((obj.sampling_params or {}).get("custom_params"))
            self._answers.finished(timing.tokens, timing.per_token, timing.speed, options.min_tokens_per_second or 0.0)
        if (context := request_middleware.current()) is not None:
            context.fields.setdefault("answers", []).append(self._log_entry(obj, out, finish, timing))

    @staticmethod
    def _count(obj: Any, meta: dict[str, Any], reason: dict[str, Any]) -> None:
        """Count the answer's tokens for the limits of the request's key."""
        if (current := admission.current()) is None or not obj.log_metrics:
            return
        if reason.get("type") == "abort" and "waiting timeout" in str(reason.get("message")):
            current.never_read(obj.rid)
            return
        cached, completion = meta.get("cached_tokens") or 0, meta.get("completion_tokens") or 0
        current.answered(obj.rid, cached, completion, first_pass=reason.get("length") == 0)

    def _log_entry(self, obj: Any, out: Any, finish: str | None, timing: Timing) -> dict[str, Any]:
        meta = out["meta_info"]
        entry = {
            "id": obj.rid,
            "finish_reason": finish,
            "prompt_tokens": meta.get("prompt_tokens"),
            "cached_tokens": meta.get("cached_tokens"),
            "completion_tokens": timing.tokens,
            "queue_seconds": _rounded(meta.get("queue_time")),
            "first_token_seconds": _rounded(timing.first),
            "seconds_per_token": _rounded(timing.per_token),
        }
        if self._content:
            prompt = obj.text if obj.text is not None else self._tokenizer.decode(obj.input_ids)
            entry |= {"prompt": prompt, "answer": out.get("text")}
        return entry


class Timing:
    """Times of a whole answer, from SGLang's `meta_info`; None where one is missing.

    tokens: completion tokens. first: seconds to the first token. per_token: seconds between later tokens.
    speed: tokens per second, from the beginning of its first prefill on.
    """

    def __init__(self, meta: dict[str, Any]) -> None:
        received, entered = meta.get("request_received_ts"), meta.get("forward_entry_time")
        prefilled, finished = meta.get("prefill_finished_time"), meta.get("request_finished_ts")
        self.tokens = int(meta.get("completion_tokens") or 0)
        self.first = prefilled - received if prefilled and received else None
        self.per_token = self.speed = None
        if prefilled and finished and self.tokens > 1:
            self.per_token = (finished - prefilled) / (self.tokens - 1)
        if entered and finished and finished > entered:
            self.speed = self.tokens / (finished - entered)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)
