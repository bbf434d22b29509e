"""Parse tool calls and reasoning of a streamed chat token by token, however many the engine sends at once.

SGLang's parsers expect the text of one token. With more at once, as after accepted drafts or on a busy event loop, they
lose text or a whole call.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import AsyncIterator
from json import JSONDecoder
from typing import Any

from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call import base_format_detector
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.utils import _partial_json_loads, get_json_schema_constraint
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.parser.response_template import ResponseTemplateToolDetector

from .token_text import TokenTexts
from .tool_schemas import enforced

LONGEST_MARKER = 48
MARKER_BEGINS = ("<", "[")


class ToolParser(FunctionCallParser):
    """SGLang's, with two changes.

    A forced call follows the schema of its tool, strict or not, and a named tool is the only one that may be called.

    Detectors hold back the end of a text that looks like the beginning of a call, as in "1 <". It is sent once no call
    can follow. Detectors without `finish` would never send it, so a streamed answer would lack text that a whole one
    has.
    """

    tools: list[Tool]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._input: list[str] = []
        self._output: list[str] = []

    def get_structure_constraint(self, tool_choice: ToolChoice | str, *args: Any, **kwargs: Any) -> Any:
        given = self.tools
        if isinstance(tool_choice, ToolChoice):
            given = self.tools = [tool for tool in given if tool.function.name == tool_choice.function.name]
        if tool_choice != "auto" and not isinstance(self.detector, ResponseTemplateToolDetector):
            self.tools = [enforced(tool) for tool in given]
        constraint = super().get_structure_constraint(tool_choice, *args, **kwargs)
        if constraint is None and self.tools is not given:  # a format that cannot express the schema
            self.tools = given
            constraint = super().get_structure_constraint(tool_choice, *args, **kwargs)
        return constraint

    def get_legacy_structural_tag(self, at_least_one: bool = False) -> Any:
        tag = super().get_legacy_structural_tag(at_least_one)
        for structure in tag.structures:
            structure.schema_ = structure.schema_ or {"type": "object"}
        return tag

    def parse_non_stream(self, full_text: str, **kwargs: Any) -> tuple[str, list[Any]]:
        return super().parse_non_stream(_escaped(full_text, self.detector.bot_token, self.detector.eot_token), **kwargs)

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[Any]]:
        text, calls = super().parse_stream_chunk(chunk_text)
        self._input.append(chunk_text)
        self._output.append(text)
        return text, calls

    def parse_stream_end(self) -> tuple[str, list[Any]]:
        text, calls = super().parse_stream_end()
        return text + self._held_back(), calls

    def _held_back(self) -> str:
        given, parsed = "".join(self._input), "".join(self._output)
        if type(self.detector).finish is not BaseFormatDetector.finish or self.has_tool_call(given):
            return ""
        rest = given[len(parsed) :] if given.startswith(parsed) else ""
        return rest if len(rest) < LONGEST_MARKER and rest.lstrip().startswith(MARKER_BEGINS) else ""


def _escaped(text: str, begin: str, end: str) -> str:
    """Return the text with each `end` in JSON after `begin` escaped: detectors would end the call there."""
    parts, position = [], 0
    while begin and (marker := text.find(begin, position)) >= 0:
        start = marker + len(begin)
        start += len(text[start:]) - len(text[start:].lstrip())
        try:
            after = JSONDecoder().raw_decode(text, start)[1]
        except (ValueError, RecursionError):
            break
        parts += [text[position:start], text[start:after].replace(end, end.replace("<", r"\u003c"))]
        position = after
    return "".join(parts) + text[position:]


def _without_open_numbers(text: str, flags: Any) -> Any:
    """Parse incomplete JSON without a trailing number: 125 may become 125e-2, which is streamed as 1.25."""
    return _partial_json_loads(text, flags & ~base_format_detector.Allow.NUM)


def _json_schema_constraint(tools: list[Tool], *args: Any, **kwargs: Any) -> Any:
    return get_json_schema_constraint([enforced(tool) for tool in tools], *args, **kwargs)


serving_chat.FunctionCallParser = ToolParser  # type: ignore[misc]
serving_chat.get_json_schema_constraint = _json_schema_constraint
base_format_detector._partial_json_loads = _without_open_numbers


class TokenwiseChat(OpenAIServingChat):
    """SGLang's chat handler; its parsers see a stream as if each step had given one token."""

    def for_stream(self, internal: GenerateReqInput, request: Any) -> TokenwiseChat:
        """Return a handler for one streamed answer; itself if the text of the answer is not parsed."""
        if not (self._tool_call_parsing_active(request) or (self.reasoning_parser and request.separate_reasoning)):
            return self
        handler, tokenizer = copy.copy(self), self.tokenizer_manager.tokenizer
        parameters = internal.sampling_params
        parameters = parameters[0] if isinstance(parameters, list) else parameters
        decoding = {
            "skip_special": parameters.get("skip_special_tokens", True),
            "spaces_between": parameters.get("spaces_between_special_tokens", True),
        }
        handler._choices = defaultdict(lambda: _Choice(TokenTexts(tokenizer, **decoding)))
        return handler

    _choices: defaultdict[int, _Choice] | None = None
    """The choices of one answer, by index."""

    async def _generate_stream_content(
        self,
        content: dict[str, Any],
        index: int,
        request: Any,
        stream_offsets: dict[int, int],
        choice_logprobs: dict[str, Any] | None,
        finish_reason_type: str | None,
        **others: Any,
    ) -> AsyncIterator[str]:
        """Yield SGLang's chunks for each token's text of a step in turn.

        Logprobs go with the next chunk. A finished answer ends with a last text, maybe empty, which ends the parsers.
        """
        step = {"index": index, "request": request, "stream_offsets": stream_offsets, **others}
        if self._choices is None:
            whole = {"choice_logprobs": choice_logprobs, "finish_reason_type": finish_reason_type}
            async for chunk in super()._generate_stream_content(content=content, **step, **whole):
                yield chunk
            return
        choice = self._choices[index]
        texts = choice.follow(content, finished=finish_reason_type is not None)
        choice.add_logprobs(choice_logprobs)
        for left, text in zip(reversed(range(len(texts))), texts, strict=True):
            async for chunk in super()._generate_stream_content(
                content={**content, "text": choice.advance(text)},
                choice_logprobs=choice.take_logprobs(),
                finish_reason_type=None if left else finish_reason_type,
                **step,
            ):
                yield chunk


class _Choice:
    """Reading position in one choice, and its text that is not sent yet."""

    def __init__(self, texts: TokenTexts):
        self._texts = texts
        self._read_text = self._read_ids = 0
        self._sent = ""
        self._logprobs: dict[str, Any] | None = None

    def follow(self, content: dict[str, Any], *, finished: bool) -> list[str]:
        """Return the texts of the tokens that are complete now, see `TokenTexts.add`."""
        text, ids = content["text"][self._read_text :], content["output_ids"][self._read_ids :]
        self._read_text, self._read_ids = self._read_text + len(text), self._read_ids + len(ids)
        return self._texts.add(text, ids, finished=finished)

    def advance(self, text: str) -> str:
        """Add the next token's text, and return the text so far, as SGLang takes it."""
        self._sent += text
        return self._sent

    def add_logprobs(self, logprobs: dict[str, Any] | None) -> None:
        """Keep logprobs for the next chunk; tokens without text yet make no chunk."""
        if self._logprobs is not None and logprobs is not None:
            logprobs = {**logprobs, "content": self._logprobs["content"] + logprobs["content"]}
        self._logprobs = logprobs or self._logprobs

    def take_logprobs(self) -> dict[str, Any] | None:
        logprobs, self._logprobs = self._logprobs, None
        return logprobs
