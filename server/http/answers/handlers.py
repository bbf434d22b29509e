"""SGLang's OpenAI handlers, with our errors and our options for the scheduler."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sglang.srt.entrypoints.openai import serving_completions
from sglang.srt.entrypoints.openai.encoding_dsv32 import DS32EncodingError
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.io_struct import GenerateReqInput

from outrider.kernels.noise import choice_seed

from ...plugin.options import RequestOptions
from .. import errors, offload, request_middleware
from ..errors import ApiError
from ..keys import admission
from ..requests import grammars
from ..requests.grammar_process import GrammarProcess
from ..requests.json_body import SMALL_BYTES
from ..requests.protocol import ChatRequest, SpeculationOptions, TextRequest
from ..requests.sampling_defaults import SamplingDefaults
from . import logprobs
from .speculation import CollectingTokenizerManager, SpeculationCollector, add_to_answer
from .tool_stream import TokenwiseChat

TRACE_HEADERS = ("traceparent", "tracestate")

# SGLang warns of every request for its prompt's logprobs; `EchoedPrompt` returns them.
logging.getLogger(serving_completions.__name__).addFilter(
    lambda record: "Echo is not compatible" not in str(record.msg)
)


@dataclass(frozen=True, slots=True)
class DeferredAnswer:
    """A complete answer that is not serialized yet. size: roughly the bytes that `build` will return."""

    size: int
    build: Callable[[], Any]


class _Handler:
    """Mixin for SGLang's handlers of chats and completions."""

    def __init__(
        self, tokenizer_manager: Any, template_manager: Any, compiler: GrammarProcess, sampling: SamplingDefaults
    ) -> None:
        super().__init__(tokenizer_manager, template_manager)  # type: ignore[call-arg]
        self.compiler = compiler
        self.tokens_by_id = logprobs.decoded_tokens(tokenizer_manager.tokenizer)
        self.default_sampling_params = sampling.recommended

    async def _handle_streaming_request(self, internal: GenerateReqInput, request: Any, raw: Request) -> Any:
        refused = await self._refused_grammar(internal, request)
        return refused or await super()._handle_streaming_request(internal, request, raw)  # type: ignore[misc]

    async def _handle_non_streaming_request(self, internal: GenerateReqInput, request: Any, raw: Request) -> Any:
        refused = await self._refused_grammar(internal, request)
        answer = refused or await super()._handle_non_streaming_request(internal, request, raw)  # type: ignore[misc]
        if not isinstance(answer, DeferredAnswer):
            return answer
        if answer.size <= SMALL_BYTES:
            return answer.build()
        return await offload.run(answer.size, answer.build)

    async def _refused_grammar(self, internal: GenerateReqInput, request: Any) -> Response | None:
        """Return the error for a grammar that the scheduler must not see; None if the grammar is fine."""
        parameters = internal.sampling_params
        if isinstance(parameters, list):  # one per choice; all have the same grammar
            parameters = parameters[0]
        try:  # only here: converting the request made the grammar of its tools
            await grammars.compile_for(self.compiler, request, parameters)
        except ApiError as error:
            return error.response()
        return None

    def create_error_response(
        self, message: str, err_type: str = "", status_code: int = 400, param: str | None = None
    ) -> JSONResponse:
        if (current := admission.current()) is not None and current.refusal is not None:
            return current.refusal.response()
        return errors.of_engine(message, status_code, param).response()

    def create_streaming_error_response(self, message: str, err_type: str = "", status_code: int = 400) -> str:
        error = errors.of_engine(message, status_code)
        if (context := request_middleware.current()) is not None:
            context.error = error.status
        return json.dumps(error.body())

    def _convert_to_internal_request(self, request: Any, raw_request: Request | None = None) -> tuple[Any, Any]:
        speculation = request.speculation or SpeculationOptions()
        options = RequestOptions(
            enabled=speculation.enabled,
            min_tokens_per_second=request.min_tokens_per_second,
            trace=speculation.trace,
            learn=request._learn,
            learner=request._own.learner,
            learned=request._own.learned,
            adapter=request._own.adapter,
            corpus=request._corpus,
            stored=request._stored,
        )
        request.custom_params = options.to_custom_params()
        internal, request = super()._convert_to_internal_request(request, raw_request)  # type: ignore[misc]
        if request.seed is not None:
            internal = _with_seed_per_choice(internal, request.seed, request.n)
        if internal.image_data and request.n > 1:  # a list for each prompt; else SGLang gives each prompt one image
            prompts = internal.text if isinstance(internal.text, list) else [internal.text]
            internal.image_data = [internal.image_data for _ in prompts]
        return internal, request

    def _resolve_lora_path(self, request_model: str, explicit_lora_path: str | None) -> str | None:
        # SGLang would take the part after a colon in the model's name for an adapter.
        base = self.tokenizer_manager.served_model_name  # type: ignore[attr-defined]
        return None if request_model == base else request_model

    def _collector(self, request: Any) -> SpeculationCollector:
        manager = self.tokenizer_manager  # type: ignore[attr-defined]
        return SpeculationCollector(
            manager.tokenizer,
            (manager.config_value("speculative_num_draft_tokens") or 1) - 1,
            trace=request.speculation is not None and request.speculation.trace,
            keep_special=not request.skip_special_tokens,
        )

    def _annotated_stream(
        self, make_stream: Callable[..., Any], internal: GenerateReqInput, request: Any, raw: Request
    ) -> Any:
        """Return SGLang's stream, made by make_stream(handler, …), with its speculation data."""
        collector = self._collector(request)
        if not (collector.trace or (request.stream_options and request.stream_options.include_usage)):
            return make_stream(self, internal, request, raw)
        handler = copy.copy(self)
        handler.tokenizer_manager = CollectingTokenizerManager(self.tokenizer_manager, collector.add)  # type: ignore[attr-defined]
        return collector.annotate(make_stream(handler, internal, request, raw))

    def _deferred(
        self,
        make: Callable[..., Any],
        logprobs_of: Callable[[dict[str, Any]], orjson.Fragment] | None,
        request: Any,
        contents: list[dict[str, Any]],
        created: int,
    ) -> DeferredAnswer:
        """Defer building a whole answer. make: builds SGLang's. logprobs_of: writes a choice's logprobs, if any."""

        def build() -> Any:
            without_logprobs = request if logprobs_of is None else request.model_copy(update={"logprobs": None})
            answer = make(without_logprobs, contents, created)
            if isinstance(answer, Response) or not hasattr(answer, "usage"):
                return answer
            body = answer.model_dump()
            add_to_answer(body, contents, collector)
            if logprobs_of is not None:
                for choice, content in zip(body["choices"], contents, strict=True):
                    choice["logprobs"] = logprobs_of(content["meta_info"])
            return Response(orjson.dumps(body), media_type="application/json")

        collector = self._collector(request)
        entries = sum(logprobs.entries_of(content["meta_info"]) for content in contents)
        if collector.trace:
            entries += sum(len(content["output_ids"]) for content in contents)
        size = sum(len(content["text"]) for content in contents) + entries * logprobs.ENTRY_BYTES
        return DeferredAnswer(size, build)


def _with_seed_per_choice(internal: GenerateReqInput, seed: int, n: int) -> GenerateReqInput:
    """Send n samples as n prompts with a seed each: SGLang would give all choices of a request the same seed."""
    name = "text" if internal.text is not None else "input_ids"
    prompts = getattr(internal, name)
    several = isinstance(prompts, list) and not isinstance(prompts[0], int)
    if n == 1 and not several:
        return internal
    prompts = [prompt for prompt in (prompts if several else [prompts]) for _ in range(n)]
    setattr(internal, name, prompts)
    internal.sampling_params = [
        {**internal.sampling_params, "n": 1, "sampling_seed": choice_seed(seed, index)} for index in range(len(prompts))
    ]
    return internal


class ChatHandler(_Handler, TokenwiseChat):
    """/v1/chat/completions"""

    async def handle_request(self, request: Any, raw_request: Request) -> Any:
        if request._body_bytes <= SMALL_BYTES and not request.tools:
            return await super().handle_request(request, raw_request)
        prepared = await offload.run(request._body_bytes, self._prepared, request, raw_request)
        return await OpenAIServingChat.handle_request(prepared, request, raw_request)

    def _prepared(self, request: ChatRequest, raw: Request) -> ChatHandler:
        """Return a copy that has checked the tools, and rendered and tokenised the template. For a thread."""
        prepared = copy.copy(self)
        prepared._validate_request = _result_of(self._validate_request, request)  # type: ignore[method-assign]
        with contextlib.suppress(Exception):  # raised again when SGLang calls the method
            if prepared._validate_request(request) is None:
                convert = _result_of(self._convert_to_internal_request, request, raw)
                prepared._convert_to_internal_request = convert  # type: ignore[method-assign]
        return prepared

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """Return the tokens of the prompt that the request would send to the engine. For a thread, if it may be long.

        Raises ApiError if the prompt is wrong.
        """
        try:
            if (refusal := self._validate_request(request)) is not None:
                raise ValueError(refusal)
            internal, _ = self._convert_to_internal_request(request)
        except (DS32EncodingError, ValueError) as error:
            raise errors.of_engine(str(error), 400) from None
        if internal.input_ids is not None:
            return list(internal.input_ids)
        return list(self.tokenizer_manager.tokenizer.encode(internal.text))

    def _generate_chat_stream(self, internal: GenerateReqInput, request: Any, raw: Request) -> Any:
        handler: Any = self.for_stream(internal, request)
        return handler._annotated_stream(OpenAIServingChat._generate_chat_stream, internal, request, raw)

    def _build_chat_response(self, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
        write = functools.partial(logprobs.chat_logprobs, self.tokens_by_id) if request.logprobs else None
        return self._deferred(super()._build_chat_response, write, request, ret, created)

    def _build_token_logprobs_from_raw(self, tokens: Any, tops: Any) -> Any:
        return logprobs.chat_models(self.tokens_by_id, tokens, tops or ())

    def _render_and_encode_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._render_and_encode_chat_template(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:
            # A template that fails on a client's values is the client's error; SGLang knows only TypeError as one.
            raise TypeError(f"the chat template cannot use these messages and chat_template_kwargs: {error}") from None


def _result_of(work: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Do the work, and return a function that returns its value or raises its exception."""
    done = Future[Any]()
    try:
        done.set_result(work(*args))
    except Exception as error:
        done.set_exception(error)
    return lambda *_: done.result()


class TextHandler(_Handler, OpenAIServingCompletion):
    """/v1/completions

    A request without sampling parameters gets the model's (`--sampling-defaults`); SGLang does that for chats alone.

    With `echo` and `logprobs` the prompt's logprobs come first; its first token has none. With `max_tokens` 0 the
    answer is empty: SGLang draws a token anyway, and it is dropped here.
    """

    def _convert_to_internal_request(self, request: Any, raw_request: Request | None = None) -> tuple[Any, Any]:
        for name, value in self.default_sampling_params.items():
            if name not in request.model_fields_set:
                setattr(request, name, value)
        prompt_only = request.max_tokens == 0
        if prompt_only:
            request.max_tokens = 1
        internal, request = super()._convert_to_internal_request(request, raw_request)
        if request.echo and request.logprobs is not None:
            internal.logprob_start_len = 0
        if prompt_only:
            request.max_tokens = 0
        return internal, request

    def _generate_completion_stream(self, internal: GenerateReqInput, request: Any, raw: Request) -> Any:
        make = OpenAIServingCompletion._generate_completion_stream
        if not self._with_prompt(request):
            return self._annotated_stream(make, internal, request, raw)
        echoed, handler = logprobs.EchoedPrompt(self.tokens_by_id), copy.copy(self)
        handler.tokenizer_manager = CollectingTokenizerManager(self.tokenizer_manager, echoed.add)  # type: ignore[assignment]
        return echoed.annotate(handler._annotated_stream(make, internal, request, raw))

    def _build_completion_response(self, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
        if request.max_tokens == 0:
            for answer in ret:
                _keep_prompt_only(answer)
        write = None
        if request.logprobs is not None:
            write = functools.partial(logprobs.text_logprobs, self.tokens_by_id, prompt=self._with_prompt(request))
        return self._deferred(super()._build_completion_response, write, request, ret, created)

    @staticmethod
    def _with_prompt(request: TextRequest) -> bool:
        """Return True if the answer has the logprobs of the prompt."""
        return bool(request.echo) and request.logprobs is not None


def _keep_prompt_only(answer: dict[str, Any]) -> None:
    """Leave only the prompt of an answer."""
    answer.update(text="", output_ids=[])
    answer["meta_info"].update(completion_tokens=0, finish_reason={"type": "length"})
    for name in ("output_token_logprobs", "output_top_logprobs"):
        answer["meta_info"].pop(name, None)


def _without_control_headers(raw: Request, kept_names: Collection[str]) -> Request:
    """Keep only these headers of a request.

    SGLang's own let a client choose the engine, its priority, the source of a cache, and fields of the answer.
    """
    kept = [(name, value) for name, value in raw.scope["headers"] if name.decode("latin-1") in kept_names]
    return Request({**raw.scope, "headers": kept}, raw.receive)


async def answer(handler: ChatHandler | TextHandler, request: ChatRequest | TextRequest, raw: Request) -> Response:
    """Run a request through SGLang's handler."""
    kept_names = {*TRACE_HEADERS}
    if handler.allowed_custom_labels:  # by a flag of SGLang's
        kept_names.add(handler.tokenizer_manager.server_args.tokenizer_metrics_custom_labels_header.lower())
    result = await handler.handle_request(request, _without_control_headers(raw, kept_names))
    if isinstance(result, StreamingResponse):
        stream: Any = result.body_iterator
        first = await anext(stream)  # SGLang has waited for it
        if (failure := errors.of_stream(first)) is not None:
            await stream.aclose()
            return failure
        # Closing the stream aborts the request at once; SGLang's background task would do so two seconds later.
        result.background = None
        result.body_iterator = _closing(first, stream)
        result.headers["Cache-Control"] = "no-cache"
        return result
    if isinstance(result, Response):
        return result
    return Response(result.model_dump_json(), media_type="application/json")


async def _closing(first: str, stream: Any) -> AsyncIterator[Any]:
    async with aclosing(stream):
        yield first
        async for chunk in stream:
            yield chunk
