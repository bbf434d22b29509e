"""Speculation data of answers: counts in the usage, acceptance as vLLM reports it, each token's source on request."""

import json
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from tokenizers.decoders import DecodeStream

from ...plugin.decode.optional.trace import KEY, MAKERS

USAGE_CHUNK = '"choices":[]'
"""Part of a stream's chunk with the usage. A text cannot contain it: its quotes would be escaped."""


class SpeculationCollector:
    """Collects a request's speculation data while SGLang's handler streams the answer.

    trace: also collect each token's source; otherwise only the totals at the end. width: of the longest draft.
    keep_special: special tokens are in the text.
    """

    def __init__(self, tokenizer: Any, width: int, *, trace: bool, keep_special: bool = False):
        self.tokenizer, self.width, self.trace, self.keep_special = tokenizer, width, trace, keep_special
        self._latest: dict[int, dict[str, Any]] = {}
        self._traces: dict[int, TokenTrace] = {}
        self._pending: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def add(self, content: dict[str, Any]) -> None:
        """Add the tokenizer manager's output for one choice."""
        index, meta = content.get("index", 0), content["meta_info"]
        self._latest[index] = meta
        if self.trace:
            if index not in self._traces:
                self._traces[index] = TokenTrace(self.tokenizer, keep_special=self.keep_special)
            self._pending[index] += self._traces[index].follow(content)

    async def annotate(self, stream: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Yield the chunks of the stream, with trace entries and usage totals."""
        async with aclosing(stream):
            async for chunk in stream:
                yield self._annotated(chunk)

    def _annotated(self, chunk: str) -> str:
        if not (self.trace or USAGE_CHUNK in chunk) or not chunk.startswith("data: {"):
            return chunk
        body = json.loads(chunk.removeprefix("data: "))
        if body.get("usage") and not body.get("choices"):
            add_totals(body, list(self._latest.values()), self.width)
        for choice in body.get("choices") or ():
            if choice.get("delta", {}).get("role"):
                continue  # it opens a stream; its text comes in the next chunk
            if entries := self._pending.pop(choice["index"], None):
                choice["speculation"] = {"trace": entries}
        return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


class TokenTrace:
    """The tokens of one choice: text, source and confidence of each.

    The texts together are the answer's text. A character of several tokens belongs to the last of them; tokens that a
    stop string cuts off have no text.
    """

    def __init__(self, tokenizer: Any, *, keep_special: bool = False):
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=not keep_special)
        self._seen = 0
        self._decoded = 0  # end of the last token's text
        self._sent = 0  # characters returned; may be ahead: the engine shows a word before an incomplete character

    def follow(self, content: dict[str, Any]) -> list[dict[str, Any]]:
        """Return entries for the new tokens in `content`, the answer so far. The last gets the rest of the text."""
        text, ids, makers = content["text"], content["output_ids"], content["meta_info"].get(KEY, [])
        upto = min(len(ids), len(makers))
        entries = []
        for token, told in zip(ids[self._seen : upto], makers[self._seen : upto], strict=True):
            self._decoded = self._after(token, text)
            if told is None:  # missing: the engine failed to record it; the next token gets the text
                continue
            maker, confidence = told
            begin, self._sent = self._sent, max(self._sent, self._decoded)
            entries.append(
                {
                    "token": text[begin : self._sent],
                    "source": MAKERS[maker],
                    "confidence": None if math.isnan(confidence) else round(confidence, 4),
                }
            )
        self._seen = upto
        if entries:
            entries[-1]["token"] += text[self._sent :]
            self._sent = len(text)
        return entries

    def _after(self, token: int, text: str) -> int:
        """Return the end of the token's text."""
        piece = self._tokenizer and self._stream.step(self._tokenizer, token)
        if not piece:
            return self._decoded
        # Some tokenizers drop the space before the first word.
        begin = max(text.find(piece, self._decoded, self._decoded + len(piece) + 1), self._decoded)
        return min(begin + len(piece), len(text))


class CollectingTokenizerManager:
    """SGLang's tokenizer manager that also calls `collect` with its output for a request."""

    def __init__(self, manager: Any, collect: Callable[[dict[str, Any]], None]):
        self._manager, self._collect = manager, collect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, *args: Any) -> AsyncIterator[dict[str, Any]]:
        async with aclosing(self._manager.generate_request(*args)) as contents:
            async for content in contents:
                self._collect(content)
                yield content


def add_to_answer(body: dict[str, Any], contents: Sequence[dict[str, Any]], collector: SpeculationCollector) -> None:
    """Add the data to a whole answer. contents: the tokenizer manager's output for each choice."""
    add_totals(body, [content["meta_info"] for content in contents], collector.width)
    if collector.trace:
        for choice, content in zip(body["choices"], contents, strict=True):
            trace = TokenTrace(collector.tokenizer, keep_special=collector.keep_special)
            choice["speculation"] = {"trace": trace.follow(content)}


def add_totals(body: dict[str, Any], choices: Sequence[dict[str, Any]], width: int) -> None:
    """Add counts of draft tokens to the usage, in OpenAI's format, and acceptance in vLLM's, which AIPerf reads.

    choices: SGLang's `meta_info` of each. width: of the longest draft.
    """
    accepted = sum(meta.get("spec_num_correct_drafts", 0) for meta in choices)
    verified = sum(_drafts(meta.get("spec_cap_lens_histogram", ())) for meta in choices)
    body["usage"]["completion_tokens_details"] = {
        "reasoning_tokens": body["usage"].get("reasoning_tokens") or 0,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": verified - accepted,
    }
    if len(choices) != 1 or not (steps := choices[0].get("spec_verify_ct", 0)):
        return
    by_accepted = choices[0]["spec_correct_drafts_histogram"]
    body["metrics"] = {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps,
            "draft_acceptance_rate": accepted / verified if verified else 0.0,
            "acceptance_histogram": [*by_accepted, *[0] * (width + 1 - len(by_accepted))],
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": verified,
            "num_spec_steps": steps,
            "num_spec_tokens": width,
        }
    }


def _drafts(steps: Iterable[int]) -> int:
    """Return the number of draft tokens. steps: number of steps that verified 0, 1, 2 … tokens, the anchor included."""
    return sum((length - 1) * count for length, count in enumerate(steps))
