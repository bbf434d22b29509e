"""Make /openapi.json from the models that parse requests; /docs shows it (`routes/page.py`).

It describes the accepted fields, with bounds and defaults of the running server, and no answers.
"""

import math
from collections.abc import Iterable
from dataclasses import is_dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Optional

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticOmit

from .keys.auth import OPEN_PATHS
from .requests import bounds
from .requests.bounds import ROLES
from .requests.dialect import Dialect
from .requests.effect import WITHOUT_EFFECT
from .requests.protocol import CHAT, MEANINGLESS, TEXT, Kind
from .requests.sampling_defaults import SamplingDefaults
from .requests.validation import Limits

REF = "#/components/schemas/{model}"
NOT_SERVED = (
    *(f"ChatCompletionMessageContent{kind}" for kind in ("Image", "Video", "Audio", "ToolReference", "Thinking")),
    *("LegacyStructuralTag", "StructuralTag"),
)
"""Prefixes of SGLang's models that are not accepted in requests."""
TAGS = {"/v1/messages": "Anthropic", "/v1/": "OpenAI", "/": "Outrider"}
"""Prefixes of paths, with the API they belong to."""
DESCRIPTION = """\
OpenAI's and Anthropic's routes, and a few of Outrider's. What a request may not carry is refused, and the error says
why. null, [] and {} ask for nothing, wherever they stand; `cache_control` and `annotations` are taken anywhere, and no
answer depends on them."""


class ErrorDetail(BaseModel):
    """message: the mistake, the expected value and the remedy. param: the field. code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every error, in the format of OpenAI's API."""

    error: ErrorDetail


ERROR: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "An error"}}
"""`responses` of every route."""


def request_body(model: type, **example: Any) -> dict[str, Any]:
    """Return `openapi_extra` of a route with a body of this model. example: fields that /docs offers to try."""
    schema = {"$ref": REF.format(model=model.__name__)}
    if is_dataclass(model):  # of `receive_as`; all other models are among the components
        schema = TypeAdapter(model).json_schema() | {"additionalProperties": False}
    body = {"schema": schema} | ({"example": example} if example else {})
    return {"requestBody": {"required": True, "content": {"application/json": body}}}


def responses(kind: str, text: str) -> dict[int | str, dict[str, Any]]:
    """Return `responses` of a route: besides JSON a body of this content type, which `text` describes."""
    return {200: {"content": {kind: {"schema": {"description": text}}}}}  # no type: some tools take it for an event's


def install(
    app: FastAPI, limits: Limits, sampling: SamplingDefaults, dialects: Iterable[Dialect], has_key: bool
) -> None:
    """Add the route. dialects: other APIs. has_key: routes outside `OPEN_PATHS` need a key."""

    @lru_cache(1)
    def document(adapters: tuple[str, ...]) -> dict[str, Any]:
        return _document(app, limits, sampling, dialects, has_key)

    app.openapi = lambda: document(limits.adapters())  # type: ignore[method-assign]
    app.openapi_url, app.docs_url, app.redoc_url = "/openapi.json", None, None
    app.setup()


def _document(
    app: FastAPI, limits: Limits, sampling: SamplingDefaults, dialects: Iterable[Dialect], has_key: bool
) -> dict[str, Any]:
    document = get_openapi(title="Outrider", version=version("outrider"), description=DESCRIPTION, routes=app.routes)
    schemas = document["components"]["schemas"]
    for kind in (CHAT, TEXT):
        schemas |= _request_schemas(kind, limits)
        properties = schemas[kind.model.__name__]["properties"]
        for name, value in sampling.applied.items():
            properties[name]["default"] = value
        if has_key:  # the model's name is not public
            properties["model"] = {"type": ["string", "null"]}
    chat = schemas[CHAT.model.__name__]["properties"]
    for dialect in dialects:
        schemas |= _dialect_schemas(dialect, chat)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["tags"] = [next(tag for prefix, tag in TAGS.items() if path.startswith(prefix))]
    if has_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in OPEN_PATHS & document["paths"].keys():
            document["paths"][path]["get"]["security"] = []
    return document


class _Served(GenerateJsonSchema):
    """Schemas without the alternatives that SGLang's models accept and `requests` refuses."""

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        name = schema.get("schema_ref") or getattr(schema.get("cls"), "__name__", "")
        if name.rpartition(".")[2].startswith(NOT_SERVED):
            raise PydanticOmit
        return super().generate_inner(schema)


def _request_schemas(kind: Kind, limits: Limits) -> dict[str, Any]:
    """Return the schema of a kind of request, and all schemas that it refers to, by name."""
    known = kind.model.model_fields
    # In every field null means: not given.
    given: dict[str, Any] = {
        name: (field.annotation if field.is_required() else Optional[field.annotation], field)  # noqa: UP045
        for name, field in known.items()
        if name in kind.fields
    }
    taken = create_model(
        kind.model.__name__, __config__=ConfigDict(extra="forbid"), __doc__=kind.model.__doc__, **given
    )
    schema = taken.model_json_schema(ref_template=REF, schema_generator=_Served)
    named = schema.pop("$defs")
    properties = schema["properties"]
    for name, bounds_ in _bounds(kind, limits).items():
        if name in properties:
            properties[name] = _bounded(properties[name], bounds_)
    properties |= _without_effect()
    for name, values in MEANINGLESS.items():
        properties[name] = {"enum": [*values, None], "description": "has no effect, and may be left out"}
    properties["model"] = {"enum": [limits.model, *limits.adapters(), None], "description": "may be left out"}
    for nested in named.values():
        if "enum" in (role := nested.get("properties", {}).get("role", {})):
            role["enum"] = [name for name in role["enum"] if name in ROLES]
    return {kind.model.__name__: schema} | _closed(named)


def _closed(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas closed to unknown properties."""
    closed = {"additionalProperties": False}
    return {name: schema | closed if "properties" in schema else schema for name, schema in schemas.items()}


def _without_effect() -> dict[str, Any]:
    return {name: {"description": "taken; no answer depends on it"} for name in sorted(WITHOUT_EFFECT)}


def _dialect_schemas(dialect: Dialect, chat: dict[str, Any]) -> dict[str, Any]:
    """Return another API's request schema, and all schemas that it refers to, by name. chat: fields of a chat."""
    schema = dialect.model.model_json_schema(ref_template=REF)
    named = schema.pop("$defs", {})
    schema["properties"] |= {name: chat[name] for name in sorted(dialect.passed)}
    schema["properties"] |= _without_effect()
    for name in dialect.unsupported:
        schema["properties"][name] = {"type": "null", "description": "may be left out"}
    return _closed({dialect.model.__name__: schema} | named)


def _bounds(kind: Kind, limits: Limits) -> dict[str, dict[str, Any]]:
    """Return the bounds that `requests.validation` and `requests.bounds` check beyond types, by field."""
    ranges = bounds.ranges_of(kind.model, limits.context_length, limits.max_choices)
    return {
        name: {"minimum": range_.low} | ({"maximum": range_.high} if math.isfinite(range_.high) else {})
        for name, range_ in ranges.items()
    } | {
        "messages": {"minItems": 1, "maxItems": bounds.MAX_MESSAGES},
        "prompt": {"minItems": 1, "minLength": 1},
        "tools": {"maxItems": bounds.MAX_TOOLS},
        "stop": {"maxItems": bounds.MAX_STOPS, "minLength": 1},
        "stop_token_ids": {
            "items": {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1},
            "maxItems": bounds.MAX_STOP_TOKENS,
        },
        "logit_bias": {
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -bounds.BIAS_LIMIT, "maximum": bounds.BIAS_LIMIT},
        },
    }


_BOUNDS = {
    **dict.fromkeys(("integer", "number"), ("minimum", "maximum")),
    "array": ("minItems", "maxItems", "items"),
    "string": ("minLength",),
    "object": ("propertyNames", "additionalProperties"),
}
"""Bounds that apply to a type."""


def _bounded(schema: dict[str, Any], bounds: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with bounds where they apply, in each of its alternatives."""
    if "anyOf" in schema:
        return schema | {"anyOf": [_bounded(branch, bounds) for branch in schema["anyOf"]]}
    return schema | {name: bound for name, bound in bounds.items() if name in _BOUNDS.get(schema.get("type", ""), ())}
