"""Refuse bad grammars of requests, with the reason, before they fail in the scheduler."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from sglang.srt.constrained.json_schema_validation import validate_xgrammar_json_schema

from ...plugin.grammars import schemas
from ...plugin.grammars.examine import GrammarOutcome, GrammarVerdict
from ...plugin.grammars.folder import name_of
from ...plugin.grammars.rewrite import rewritten
from ..errors import ApiError, invalid_value, unsupported
from .grammar_process import GrammarProcess
from .protocol import ChatRequest, TextRequest

# A hundred times a grammar that people write by hand.
MAX_GRAMMAR_BYTES = 64 * 1024
FAILING_TOOL_SECONDS = 1.0
"""Time limit for finding out which of several tools has the bad schema."""
SCHEMA = "response_format.json_schema.schema"


def check(request: ChatRequest | TextRequest) -> None:
    """Raise ApiError unless the request's grammar, if any, could be compiled. Takes milliseconds."""
    grammars: list[tuple[str, Any]] = [(name, getattr(request, name)) for name in ("regex", "ebnf")]
    if isinstance(request, TextRequest):
        grammars.append(("json_schema", request.json_schema))
    if (wanted := request.response_format) is not None:
        if wanted.type == "structural_tag":
            raise unsupported("response_format.type", "'response_format.type' is one of text, json_object, json_schema")
        if wanted.type == "json_schema":
            schema = wanted.json_schema.schema_ if wanted.json_schema else None
            if schema is None:
                raise ApiError(f"{SCHEMA!r} is required", param=SCHEMA, code="missing_required_parameter")
            grammars.append((SCHEMA, schema))
        elif wanted.type == "json_object":
            grammars.append(("response_format", {"type": "object"}))
    given = [(name, grammar) for name, grammar in grammars if grammar is not None]
    if len(given) > 1:
        raise invalid_value(given[1][0], f"{' and '.join(repr(name) for name, _ in given)} exclude each other")
    for name, grammar in given:
        _check_grammar(name, grammar)
    for index, tool in enumerate(getattr(request, "tools", None) or ()):
        if tool.function.parameters is not None:
            strict = tool.function.strict and request.tool_choice != "none"
            (_check_grammar if strict else _check_size)(f"tools[{index}].function.parameters", tool.function.parameters)


def _check_grammar(name: str, grammar: Any) -> None:
    text = _check_size(name, grammar)
    kind = name if name in ("regex", "ebnf") else "json"
    try:
        if kind == "json":
            validate_xgrammar_json_schema(schema := json.loads(text))
            schemas.check(schema)
        rewritten(kind, text)
    except RecursionError:
        raise _invalid(name, "nested too deeply") from None
    except ValueError as error:
        raise _invalid(name, " ".join(str(error).split())) from None


def _check_size(name: str, grammar: Any) -> str:
    """Return the grammar as text."""
    try:
        text = grammar if isinstance(grammar, str) else json.dumps(grammar)
    except RecursionError:
        raise _invalid(name, "nested too deeply") from None
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _invalid(name, f"larger than {MAX_GRAMMAR_BYTES} bytes")
    return text


async def compile_for(
    process: GrammarProcess, request: ChatRequest | TextRequest, sampling_params: Mapping[str, Any]
) -> None:
    """Compile and try out the grammar of a request before it is sent to the scheduler.

    sampling_params: SGLang's, as the scheduler will get them. Raises ApiError, at most some seconds later, for an
        invalid grammar, or one that takes too much time or memory.
    """
    if (grammar := _grammar_of(sampling_params)) is None:
        return
    kind, text = grammar
    name = _name_of(request, kind)
    key = "full_assistant_ebnf" if sampling_params.get("ebnf_full_assistant") else kind  # SGLang's
    verdict = await process.examine(kind, text, name_of(key, text))
    if verdict.outcome is GrammarOutcome.ACCEPTED:
        return
    if name == "tools" and verdict.outcome is not GrammarOutcome.BUSY:
        name, verdict = await _failing_tool(process, request, verdict)
    raise _refused(name, verdict)


def _grammar_of(sampling_params: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return kind and text of the one grammar that SGLang's scheduler will use."""
    fields = {"json_schema": "json", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}
    grammars = ((kind, sampling_params.get(field)) for field, kind in fields.items())
    return next(((kind, text) for kind, text in grammars if text is not None), None)


def _name_of(request: ChatRequest | TextRequest, kind: str) -> str:
    """Return the request's field that the grammar comes from."""
    for name in ("regex", "ebnf"):
        if kind == name and getattr(request, name) is not None:
            return name
    if kind == "json":
        if isinstance(request, TextRequest) and request.json_schema is not None:
            return "json_schema"
        if (wanted := request.response_format) is not None and wanted.type != "text":
            return SCHEMA if wanted.type == "json_schema" else "response_format"
    return "tools"


async def _failing_tool(process: GrammarProcess, request: Any, verdict: GrammarVerdict) -> tuple[str, GrammarVerdict]:
    """Return the field of the tool with the refused schema, and the reason; `tools` if none fails alone."""
    names = [f"tools[{index}].function.parameters" for index in range(len(request.tools))]
    if len(names) == 1:
        return names[0], verdict
    alone = [
        asyncio.create_task(process.examine("json", json.dumps(tool.function.parameters or {})))
        for tool in request.tools
    ]
    try:
        _, late = await asyncio.wait(alone, timeout=FAILING_TOOL_SECONDS)
    finally:
        for task in alone:
            task.cancel()
    for name, task in zip(names, alone, strict=True):
        if task not in late and (found := task.result()).outcome in (GrammarOutcome.INVALID, GrammarOutcome.COSTLY):
            return name, found
    slow = [name for name, task in zip(names, alone, strict=True) if task in late]
    return slow[0] if len(slow) == 1 else "tools", verdict


def _refused(name: str, verdict: GrammarVerdict) -> ApiError:
    if verdict.outcome is GrammarOutcome.BUSY:
        return ApiError(verdict.reason, status=429, param=name, code="grammars_busy")
    if verdict.outcome is GrammarOutcome.INVALID:
        return _invalid(name, verdict.reason)
    return ApiError(f"{name!r} {verdict.reason}", param=name, code="invalid_grammar")


def _invalid(name: str, reason: str) -> ApiError:
    return ApiError(f"{name!r} is not valid: {reason}", param=name, code="invalid_grammar")
