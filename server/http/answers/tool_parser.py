"""SGLang's parser of streamed tool calls, without a loss that it has even token by token."""

from __future__ import annotations

from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.function_call_parser import FunctionCallParser

LONGEST_MARKER = 48
MARKER_BEGINS = ("<", "[")


class ToolParser(FunctionCallParser):
    """Says the end of a text that looked like the beginning of a call, as in "1 <", once no call can follow.

    Detectors hold it back. Those that have no `finish` of their own never give it, so a streamed answer would miss what
    a whole one has.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._given: list[str] = []
        self._said: list[str] = []

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[Any]]:
        text, calls = super().parse_stream_chunk(chunk_text)
        self._given.append(chunk_text)
        self._said.append(text)
        return text, calls

    def parse_stream_end(self) -> tuple[str, list[Any]]:
        text, calls = super().parse_stream_end()
        return text + self._withheld(), calls

    def _withheld(self) -> str:
        given, said = "".join(self._given), "".join(self._said)
        if type(self.detector).finish is not BaseFormatDetector.finish or self.has_tool_call(given):
            return ""
        rest = given[len(said) :] if given.startswith(said) else ""
        return rest if len(rest) < LONGEST_MARKER and rest.lstrip().startswith(MARKER_BEGINS) else ""
