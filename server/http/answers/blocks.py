"""Split a chat's answer into blocks of reasoning, text and tool calls, as other APIs' answers have them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block. index: place in the answer. text: of a call, its arguments. logprobs: a chat's, of a text."""

    kind: Kind
    index: int
    text: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockStep:
    """A change of one block. text, logprobs: the added ones. cut: the token limit ended the block."""

    change: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    cut: bool = False


class Blocks:
    """The blocks of one answer, made of its deltas or of its whole message.

    White space between calls, or between reasoning and a call, is dropped.
    """

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}
        self._space = ""
        self._logprobs: list[dict[str, Any]] = []

    def add(self, message: dict[str, Any], logprobs: dict[str, Any] | None) -> Iterator[BlockStep]:
        """Yield the changes by a delta, or by a whole message."""
        self._logprobs += (logprobs or {}).get("content") or ()
        if reasoning := message.get("reasoning_content"):
            yield from self._grow("reasoning", reasoning)
        if text := message.get("content"):
            if self._is_open("text") or (self._space + text).strip():
                text, self._space = self._space + text, ""
                yield from self._grow("text", text)
            else:
                self._space += text
        for index, call in enumerate(message.get("tool_calls") or ()):
            yield from self._call(call.get("index") or index, call)

    def end(self, *, cut: bool) -> Iterator[BlockStep]:
        """Yield the changes by the end of the answer. cut: the token limit ended it."""
        if self._space and not self._calls:
            yield from self._grow("text", self._space)
        yield from self._close(cut=cut)

    def _is_open(self, kind: Kind) -> bool:
        return self._open is not None and self._open.kind == kind

    def _grow(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[BlockStep]:
        if not self._is_open(kind):
            yield from self._begin(Block(kind, len(self.all)))
        assert self._open is not None
        logprobs: list[dict[str, Any]] = []
        if kind == "text":
            logprobs, self._logprobs = self._logprobs, []
            self._open.logprobs += logprobs
        self._open.text += text
        yield BlockStep("grow", self._open, text, logprobs)

    def _call(self, index: int, call: dict[str, Any]) -> Iterator[BlockStep]:
        function = call.get("function") or {}
        if index not in self._calls:
            block = Block("call", len(self.all), name=function.get("name") or "", call_id=call.get("id") or "")
            self._calls[index], self._space, self._logprobs = block, "", []
            yield from self._begin(block)
        if arguments := function.get("arguments"):
            block = self._calls[index]
            block.text += arguments
            yield BlockStep("grow", block, arguments)

    def _begin(self, block: Block) -> Iterator[BlockStep]:
        yield from self._close()
        self.all.append(block)
        self._open = block
        yield BlockStep("begin", block)

    def _close(self, *, cut: bool = False) -> Iterator[BlockStep]:
        if self._open is not None:
            yield BlockStep("end", self._open, cut=cut)
        self._open = None
