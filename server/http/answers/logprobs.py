"""Write the logprobs of answers in OpenAI's format, from the output of SGLang's tokenizer manager.

A prompt or an answer that fills the context has some hundred thousand logprobs. SGLang makes a pydantic model of each
on the event loop, which takes seconds; here a thread writes them as JSON, token by token.
"""

import functools
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import orjson
from sglang.srt.entrypoints.openai import serving_completions
from sglang.srt.entrypoints.openai.protocol import ChatCompletionTokenLogprob, LogProbs
from sglang.srt.entrypoints.openai.utils import _is_byte_level_tokenizer, _lossless_token_text, token_id_to_bytes

from .. import offload

ENTRY_BYTES = 64
"""Estimated bytes of one logprob in an answer."""
MAX_DECODED = 65_536
"""Number of decoded tokens to keep."""

Logprob = tuple[float | None, int]
"""A token's logprob and its id."""


class DecodedToken(NamedTuple):
    """A token as answers show it. text, bytes: in chats; the text lacks bytes that are no whole character. lossless:
    text in completions, with such bytes as Latin-1."""

    text: str
    bytes: list[int]
    lossless: str


class DecodedTokens(dict[int, DecodedToken]):
    """Decoded tokens by their id, each decoded when it is first looked up."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        # Computed once: SGLang reads all of a vocabulary for it.
        self._byte_level = tokenizer is not None and _is_byte_level_tokenizer(tokenizer)

    def __missing__(self, token: int) -> DecodedToken:
        text = lossless = self._tokenizer.decode([token])
        spelled = None
        if self._byte_level:
            spelled = token_id_to_bytes(self._tokenizer, token)
            lossless = _lossless_token_text(self._tokenizer, token, text)
        if len(self) >= MAX_DECODED:
            self.clear()
        self[token] = decoded = DecodedToken(text, list(text.encode()) if spelled is None else spelled, lossless)
        return decoded


@functools.cache
def decoded_tokens(tokenizer: Any) -> DecodedTokens:
    """Return the table of a tokenizer, one for all requests."""
    return DecodedTokens(tokenizer)


def install(manager: Any) -> None:
    """Make SGLang's tokenizer manager keep logprobs without texts, which it would write on the event loop."""

    def keep_logprobs(logprobs: list[float | None], tokens: list[int], _: bool) -> list[Logprob]:
        return list(zip(logprobs, tokens, strict=True))

    def keep_top_logprobs(logprobs: list[Any], tokens: list[Any], _: bool) -> list[list[Logprob] | None]:
        return [list(zip(*place)) if place[0] else None for place in zip(logprobs, tokens, strict=True)]  # noqa: B905

    manager.detokenize_logprob_tokens, manager.detokenize_top_logprobs_tokens = keep_logprobs, keep_top_logprobs


def chat_logprobs(tokens_by_id: DecodedTokens, meta: dict[str, Any]) -> orjson.Fragment:
    """Return a chat choice's `logprobs`, as JSON. meta: SGLang's `meta_info` of a whole answer."""
    entries = _chat_entries(tokens_by_id, meta["output_token_logprobs"], meta.get("output_top_logprobs") or ())
    return orjson.Fragment(b'{"content":[%s]}' % b",".join(map(orjson.dumps, entries)))


def chat_models(
    tokens_by_id: DecodedTokens, tokens: Sequence[Logprob], tops: Sequence[Sequence[Logprob] | None]
) -> list[ChatCompletionTokenLogprob]:
    """Return the logprobs of a stream's chunk as SGLang's models."""
    return [ChatCompletionTokenLogprob(**entry) for entry in _chat_entries(tokens_by_id, tokens, tops)]


def _chat_entries(
    tokens_by_id: DecodedTokens, tokens: Sequence[Logprob], tops: Sequence[Sequence[Logprob] | None]
) -> Iterator[dict[str, Any]]:
    for index, (logprob, token) in enumerate(tokens):
        top = (tops[index] or ()) if index < len(tops) else ()
        alternatives = [_chat_entry(tokens_by_id, *pair) for pair in top]
        yield _chat_entry(tokens_by_id, logprob, token) | {"top_logprobs": alternatives}


def _chat_entry(tokens_by_id: DecodedTokens, logprob: float | None, token: int) -> dict[str, Any]:
    decoded = tokens_by_id[token]
    return {"token": decoded.text, "bytes": decoded.bytes, "logprob": logprob}


def text_logprobs(tokens_by_id: DecodedTokens, meta: dict[str, Any], *, prompt: bool) -> orjson.Fragment:
    """Return a completion's `logprobs`, as JSON. prompt: begin with the prompt's logprobs."""
    sides = ("input", "output") if prompt else ("output",)
    tokens = [entry for side in sides for entry in meta.get(f"{side}_token_logprobs") or ()]
    tops = [entry for side in sides for entry in meta.get(f"{side}_top_logprobs") or ()]
    fields = {
        "text_offset": (b"-1" for _ in tokens),  # SGLang does not know it
        "token_logprobs": (orjson.dumps(logprob) for logprob, _ in tokens),
        "tokens": (orjson.dumps(tokens_by_id[token].lossless) for _, token in tokens),
        "top_logprobs": (orjson.dumps(_by_text(tokens_by_id, top)) for top in tops),
    }
    return orjson.Fragment(
        b"{%s}" % b",".join(b'"%s":[%s]' % (name.encode(), b",".join(fields[name])) for name in fields)
    )


def _by_text(tokens_by_id: DecodedTokens, top: Iterable[Logprob] | None) -> dict[str, float | None] | None:
    return None if top is None else {tokens_by_id[token].lossless: logprob for logprob, token in top}


def _chunk_logprobs(
    input_token_logprobs: None = None,
    output_token_logprobs: Sequence[Logprob] = (),
    input_top_logprobs: None = None,
    output_top_logprobs: Iterable[Sequence[Logprob] | None] | None = None,
    tokenizer: Any = None,
) -> LogProbs:
    """Replace SGLang's `to_openai_style_logprobs`, for the few tokens of a stream's chunk."""
    tokens_by_id = decoded_tokens(tokenizer)
    return LogProbs(
        text_offset=[-1] * len(output_token_logprobs),
        token_logprobs=[logprob for logprob, _ in output_token_logprobs],
        tokens=[tokens_by_id[token].lossless for _, token in output_token_logprobs],
        top_logprobs=[_by_text(tokens_by_id, top) for top in output_top_logprobs or ()],
    )


serving_completions.to_openai_style_logprobs = _chunk_logprobs


class EchoedPrompt:
    """Adds the logprobs of its prompt to a streamed completion; SGLang leaves them out."""

    def __init__(self, tokens_by_id: DecodedTokens) -> None:
        self._tokens_by_id = tokens_by_id
        self._begun: set[int] = set()
        self._waiting: dict[int, dict[str, Any]] = {}
        """`meta_info` with the logprobs of the first chunk, by choice."""

    def add(self, content: dict[str, Any]) -> None:
        """Take the prompt's logprobs out of the tokenizer manager's output."""
        index, meta = content.get("index", 0), content["meta_info"]
        if index not in self._begun and meta.get("input_token_logprobs"):
            count = meta["output_token_logprobs_length"]  # SGLang's lists grow while this waits
            new = {name: (meta.get(name) or [])[:count] for name in ("output_token_logprobs", "output_top_logprobs")}
            self._waiting[index] = meta | new
        self._begun.add(index)
        meta["input_token_logprobs"], meta["input_top_logprobs"] = [], []

    async def annotate(self, stream: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Yield the chunks of the stream, the first of each choice with the logprobs of its prompt."""
        async with aclosing(stream):
            async for chunk in stream:
                if self._waiting and chunk.startswith("data: {"):
                    entries = sum(map(entries_of, self._waiting.values()))
                    chunk = await offload.run(entries * ENTRY_BYTES, self._with_prompt, chunk)
                yield chunk

    def _with_prompt(self, chunk: str) -> str:
        body = orjson.loads(chunk.removeprefix("data: "))
        for choice in body.get("choices") or ():
            if (meta := self._waiting.pop(choice["index"], None)) is not None:
                choice["logprobs"] = text_logprobs(self._tokens_by_id, meta, prompt=True)
        return f"data: {orjson.dumps(body).decode()}\n\n"


def entries_of(meta: dict[str, Any]) -> int:
    """Return the estimated number of logprobs in `meta_info`."""
    count = 0
    for side in ("input", "output"):
        top = meta.get(f"{side}_top_logprobs") or ()
        count += len(meta.get(f"{side}_token_logprobs") or ()) + len(top) * len((top and top[-1]) or ())
    return count
