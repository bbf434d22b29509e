"""Streamed tool calls and reasoning do not depend on how an answer is cut into runs of tokens."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from tool_formats import FORMATS, MARKER, TOOLS, answer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outrider.server.http.answers.handlers import ChatHandler
from outrider.server.http.answers.logprobs import decoded_tokens
from outrider.server.http.answers.token_text import TokenTexts
from outrider.server.http.answers.tool_stream import ToolParser
from outrider.server.http.requests.protocol import ChatRequest
from outrider.server.model import bundled_model

WEATHER = ("get_weather", {"city": "Köln am Rhein", "days": 3})
HOTEL = ("find_hotel", {"near": "the station 🚉, or else"})
SAID = "Let me see… 1 < 2, héllo 🙂: "
ANSWERS = (("Sure.", (WEATHER, HOTEL)), (SAID, (WEATHER,)), (SAID, ()))
CUTS = 4
"""Random cuts of each answer."""
ONE_CALL = ("gigachat3", "interns1", "mistral")
"""Formats with one call, and parsers that stream no second one."""
UNFORCED = {"beam", "hunyuan", "muse", "spark25"}
"""Formats that SGLang enforces by no grammar, or only in their frame."""
KEEPS_FRAME = ("gpt-oss", "kimi_k3", "muse")
"""Parsers that leave an answer's markers in it, unless a reasoning parser removes them."""

Assembled = tuple[str, str, list[tuple[str, str]], str | None]
"""Content, reasoning, the calls' names and arguments, and the finish reason."""


class Engine:
    """SGLang's detokenizer on given tokens, in given runs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.choices: Sequence[tuple[list[int], list[int]]] = ()  # each choice's tokens and the lengths of its runs

    def config_value(self, name: str) -> Any:
        return None

    async def generate_request(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
        detokenizer: Any = object.__new__(DetokenizerManager)
        detokenizer.tokenizer, detokenizer.vocab_size = self.tokenizer, len(self.tokenizer)
        detokenizer.decode_status, detokenizer.disable_tokenizer_batch_decode = {}, False
        detokenizer.is_tool_call_parser_gpt_oss, detokenizer.tool_close_token_ids = False, frozenset()
        streams = [self._choice(detokenizer, index, *choice) for index, choice in enumerate(self.choices)]
        while streams:
            for stream in list(streams):
                if (content := next(stream, None)) is None:
                    streams.remove(stream)
                else:
                    yield content

    def _choice(self, detokenizer: Any, index: int, ids: list[int], runs: list[int]) -> Iterator[dict[str, Any]]:
        text, begin = "", 0
        for run in runs:
            end = begin + run
            finish = {"type": "stop", "matched": ids[-1]} if end == len(ids) else None
            batch = {
                "rids": [str(index)], "decoded_texts": [""], "decode_ids": [ids[begin:end]], "read_offsets": [0],
                "finished_reasons": [finish], "no_stop_trim": [False], "skip_special_tokens": [False],
                "spaces_between_special_tokens": [True],
            }  # fmt: skip
            (new,) = detokenizer._decode_batch_token_id_output(SimpleNamespace(**batch))
            text += new
            logprobs = [(-float(token), token) for token in ids[:end]]
            meta = {"id": "answer", "finish_reason": finish, "prompt_tokens": 1, "completion_tokens": end}
            meta |= {"output_token_logprobs": logprobs, "output_token_logprobs_length": end}
            yield {"index": index, "meta_info": meta, "text": text, "output_ids": ids[:end]}
            begin = end


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's, with every marker of every format as a token."""
    made = AutoTokenizer.from_pretrained(bundled_model.prepare())
    markers = {mark for parser in FORMATS for mark in MARKER.findall(answer(parser, "", [WEATHER, HOTEL]))}
    made.add_tokens(sorted(markers | {"<think>", "</think>"}))
    return made


def handler_of(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, **parsers: str) -> ChatHandler:
    serving = {"stream_response_default_include_usage": False, "enable_cache_report": False}
    serving |= {"return_input_ids": False, "return_output_ids": False, "incremental_streaming_output": False}
    monkeypatch.setattr(serving_chat, "get_serving", lambda: SimpleNamespace(**serving))
    handler: Any = object.__new__(ChatHandler)
    handler.tokenizer_manager, handler.tokens_by_id = Engine(tokenizer), decoded_tokens(tokenizer)
    handler.template_manager = SimpleNamespace(force_reasoning=False, reasoning_config=None)
    handler.tool_call_parser, handler.reasoning_parser = parsers.get("tools"), parsers.get("reasoning")
    handler.chat_encoding_spec, handler._encoding_adapter, handler._reasoning_detector = None, None, None
    return handler


def chunks(handler: ChatHandler, *choices: tuple[list[int], list[int]], **fields: Any) -> list[dict[str, Any]]:
    """The stream of these choices, see `Engine`."""
    engine: Any = handler.tokenizer_manager
    engine.choices = choices
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True, "tools": TOOLS, **fields}
    request = ChatRequest.model_validate(body)
    internal: Any = SimpleNamespace(sampling_params={"skip_special_tokens": False})

    async def collect() -> list[str]:
        return [chunk async for chunk in handler._generate_chat_stream(internal, request, None)]  # type: ignore[arg-type]

    lines = asyncio.run(collect())
    assert lines[-1] == "data: [DONE]\n\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def assembled(stream: Sequence[dict[str, Any]], index: int = 0) -> Assembled:
    content, reasoning, finish = "", "", None
    calls: dict[int, list[str]] = {}
    for chunk in stream:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                name, arguments = calls.setdefault(call["index"], ["", ""])
                function = call["function"]
                calls[call["index"]] = [name + (function["name"] or ""), arguments + (function["arguments"] or "")]
            finish = choice.get("finish_reason") or finish
    return content, reasoning, [tuple(calls[key]) for key in sorted(calls)], finish  # type: ignore[misc]


def random_runs(length: int, draw: random.Random) -> list[int]:
    """Runs of 1 to 16 tokens that sum to `length`."""
    runs = []
    while length:
        runs.append(min(length, draw.randint(1, 16)))
        length -= runs[-1]
    return runs


def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def singly(ids: Sequence[int]) -> list[int]:
    return [1] * len(ids)


def test_every_parser_has_a_format_here() -> None:
    assert {*FORMATS, "response_template"} == set(FunctionCallParser.ToolCallParserEnum)


@pytest.mark.slow
@pytest.mark.parametrize("parser", FORMATS)
def test_calls_are_the_same_however_their_tokens_are_cut(
    parser: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    handler = handler_of(tokenizer, monkeypatch, tools=parser)
    draw, cuts = random.Random(parser), CUTS if request.config.getoption("--exhaustive") else 2
    for text, calls in ANSWERS:
        written = answer(parser, text, calls if parser not in ONE_CALL else calls[:1])
        ids = tokens(tokenizer, written)
        single = assembled(chunks(handler, (ids, singly(ids))))
        meant = [(name, json.dumps(values)) for name, values in calls[: 1 if parser in ONE_CALL else None]]
        assert loaded(single) == [(name, json.loads(values)) for name, values in meant]
        assert single[0].strip() == text.strip()
        assert single[3] == ("tool_calls" if calls else "stop")
        for _ in range(cuts):
            assert assembled(chunks(handler, (ids, random_runs(len(ids), draw)))) == single
        if parser not in KEEPS_FRAME:
            assert whole(handler, written) == (single[0].strip(), loaded(single))


def loaded(answer: Assembled) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in answer[2]]


def whole(handler: ChatHandler, written: str) -> tuple[str, list[tuple[str, Any]]]:
    tools = ChatRequest.model_validate({"model": "m", "messages": [], "tools": TOOLS}).tools
    calls, text, _ = handler._process_tool_calls(written, tools or [], {"type": "stop"})
    return text.strip(), [(call.function.name or "", json.loads(call.function.arguments)) for call in calls or ()]


def test_choices_and_reasoning_are_the_same(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = handler_of(tokenizer, monkeypatch, tools="qwen25", reasoning="qwen3")
    written = [
        "<think>Where is it, 1 < 2? 🙂</think>" + answer("qwen25", "Sure.", [WEATHER, HOTEL]),
        "<think>Nowhere.</think>It is 1 <",
    ]
    streams = [tokens(tokenizer, text) for text in written]
    asked = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    asked["chat_template_kwargs"] = {"enable_thinking": True}

    def stream(runs: Sequence[list[int]]) -> list[dict[str, Any]]:
        return chunks(handler, *zip(streams, runs, strict=True), **asked)

    single = stream([singly(ids) for ids in streams])
    assert assembled(single, 0)[:2] == ("Sure.\n", "Where is it, 1 < 2? 🙂")
    assert loaded(assembled(single, 0)) == [WEATHER, HOTEL]
    assert assembled(single, 1) == ("It is 1 <", "Nowhere.", [], "stop")
    assert single[-1]["usage"]["completion_tokens"] == sum(map(len, streams))
    draw = random.Random(7)
    for _ in range(10):
        cut = stream([random_runs(len(ids), draw) for ids in streams])
        for index, ids in enumerate(streams):
            assert assembled(cut, index) == assembled(single, index)
            assert [-entry["logprob"] for entry in logprobs(cut, index)] == ids
        assert cut[-1]["usage"] == single[-1]["usage"]


def logprobs(stream: Sequence[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    choices = [choice for chunk in stream for choice in chunk["choices"] if choice["index"] == index]
    return [entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]


def test_a_required_call_is_the_same_too(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = handler_of(tokenizer, monkeypatch, tools="pythonic")  # without a grammar: the model writes a JSON list
    ids = tokens(tokenizer, json.dumps([{"name": name, "parameters": values} for name, values in (WEATHER, HOTEL)]))
    draw = random.Random(3)
    for runs in (singly(ids), *(random_runs(len(ids), draw) for _ in range(10))):
        answer = assembled(chunks(handler, (ids, runs), tool_choice="required"))
        assert loaded(answer) == [WEATHER, HOTEL]
        assert answer[0] == ""


@pytest.mark.parametrize("end", ["1 <", "1 [", "a <tool_c"])
@pytest.mark.parametrize("parser", FORMATS)
def test_an_end_that_looks_like_a_call_is_sent(
    parser: str, end: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = handler_of(tokenizer, monkeypatch, tools=parser)
    ids = tokens(tokenizer, end)
    assert assembled(chunks(handler, (ids, singly(ids))))[0] == end


def test_texts_of_tokens_equal_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "héllo 🙂🚉 wörld \ufffd 日本語 <think>ok\n\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    draw = random.Random(1)

    def cut(runs: Sequence[int]) -> list[str]:
        texts = TokenTexts(tokenizer, skip_special=False, spaces_between=True)
        pieces, begin = [], 0
        for run in runs:
            # an unfinished word comes later
            shown = tokenizer.decode(ids[: begin + run]).rstrip("\ufffd")
            pieces += texts.add(shown[sum(map(len, pieces)) + len(texts._pending) :], ids[begin : begin + run])
            begin += run
        return [*pieces, *texts.add("", [], finished=True)]

    single = cut(singly(ids))
    assert "".join(single) == text
    assert {"<think>", " 🙂"} <= set(single)  # one of them is several tokens
    for _ in range(50):
        assert cut(random_runs(len(ids), draw)) == single


def test_a_number_is_streamed_when_whole(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = handler_of(tokenizer, monkeypatch, tools="hermes")
    ids = tokens(tokenizer, '<tool_call>{"name": "get_weather", "arguments": {"days": 125e-2}}</tool_call>')
    assert loaded(assembled(chunks(handler, (ids, singly(ids))))) == [("get_weather", {"days": 1.25})]


def test_an_end_within_a_string_ends_no_call(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [("get_weather", {"city": 'a </tool_call> "b" <tool_call>{"name": 1}', "days": 1}), HOTEL]
    assert whole(handler_of(tokenizer, monkeypatch, tools="hermes"), answer("hermes", "", calls)) == ("", calls)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("parser", sorted({*FORMATS} - UNFORCED))
def test_a_forced_call_has_its_tools_schema_in_every_format(parser: str, choice: Any) -> None:
    fields = {"city": {"enum": ["Paris"]}, "days": {"type": "string", "pattern": "(?=a)b"}}
    schemas = {"get_weather": {"type": "object", "properties": fields}, "find_hotel": None}
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in schemas.items()]
    asked = ChatRequest.model_validate({"model": "m", "messages": [], "tools": tools, "tool_choice": choice})
    _, value = ToolParser(asked.tools, parser).get_structure_constraint(asked.tool_choice)
    text = value if isinstance(value, str) else json.dumps(value if isinstance(value, dict) else value.model_dump())
    assert "Paris" in text
    assert "(?=a)" not in text
    assert ("find_hotel" in text) == (choice == "required")
