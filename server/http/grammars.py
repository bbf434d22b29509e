"""Grammars that a request brings: refused here, with the reason, instead of failing in the scheduler."""

from __future__ import annotations

import json
from typing import Any

import xgrammar
from jsonschema import Draft202012Validator, SchemaError

from outrider.server.http.errors import ApiError
from outrider.server.http.protocol import ChatRequest, TextRequest
from outrider.server.plugin.hooks import older_sglang

# A grammar is compiled for the whole batch to wait on; what people write by hand is a hundredth of this.
MAX_GRAMMAR_BYTES = 64 * 1024


def check(request: ChatRequest | TextRequest) -> None:
    """Raise ApiError unless the request's grammar, if it has one, can be followed. Takes milliseconds; may block."""
    grammars: list[tuple[str, Any]] = [(name, getattr(request, name)) for name in ("regex", "ebnf")]
    if isinstance(request, TextRequest):
        grammars.append(("json_schema", request.json_schema))
    if (wanted := request.response_format) is not None:
        if wanted.type == "structural_tag":
            raise ApiError(
                "'response_format.type' is one of text, json_object, json_schema",
                param="response_format.type",
                code="unsupported_parameter",
            )
        if wanted.type == "json_schema":
            schema = wanted.json_schema.schema_ if wanted.json_schema else None
            if schema is None:
                raise ApiError(
                    "'response_format.json_schema.schema' is required",
                    param="response_format.json_schema.schema",
                    code="missing_required_parameter",
                )
            grammars.append(("response_format.json_schema.schema", schema))
        elif wanted.type == "json_object":
            grammars.append(("response_format", {"type": "object"}))
    given = [(name, grammar) for name, grammar in grammars if grammar is not None]
    if len(given) > 1:
        raise ApiError(
            f"{' and '.join(repr(name) for name, _ in given)} exclude each other",
            param=given[1][0],
            code="invalid_value",
        )
    for name, grammar in given:
        _check_grammar(name, grammar)


def _check_grammar(name: str, grammar: Any) -> None:
    try:
        text = grammar if isinstance(grammar, str) else json.dumps(grammar)
        if len(text) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"larger than {MAX_GRAMMAR_BYTES} bytes")
        if name == "regex":
            xgrammar.Grammar.from_regex(text)
        elif name == "ebnf":
            xgrammar.Grammar.from_ebnf(text)
        else:
            schema = json.loads(text)
            Draft202012Validator.check_schema(schema)
            older_sglang.check_schema(schema)
            xgrammar.Grammar.from_json_schema(text)
    except SchemaError as error:
        place = "/".join(str(part) for part in error.absolute_path)
        raise _invalid(name, f"{error.message}{f' (at {place})' if place else ''}") from None
    except RecursionError:
        raise _invalid(name, "nested too deeply") from None
    except (RuntimeError, ValueError) as error:
        raise _invalid(name, _reason(error)) from None


def _reason(error: Exception) -> str:
    """xgrammar's messages begin with its source file and time."""
    text = " ".join(str(error).split())
    return text.rpartition(": ")[2] if text.startswith("[") else text


def _invalid(name: str, reason: str) -> ApiError:
    return ApiError(f"{name!r} is not valid: {reason}", param=name, code="invalid_grammar")
