"""Drop the fields of a request's body that cannot change its answer, at any depth and in every API.

Clients send many: SDKs dump earlier answers with all of their fields, and editors set caching and billing options.
"""

from typing import Any

WITHOUT_EFFECT = frozenset(
    [
        *("annotations", "cache_control", "caller", "citations", "client_metadata", "diagnostics"),
        *("eager_input_streaming", "encrypted_content", "inference_geo", "prediction"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "speed"),
    ]
)
"""Fields accepted with any value. All prefixes are cached, and drafts are looked up in all of the prompt."""
EMPTY: tuple[Any, ...] = (None, [], {})
"""Values without effect."""
USER_DATA = frozenset(
    ("arguments", "chat_template_kwargs", "input", "input_schema", "metadata", "parameters", "schema")
)
"""The user's own objects, kept unchanged: schemas, notes, arguments of tools and of the chat template."""
MAX_DEPTH = 16
"""No API's own fields are nested deeper."""


def with_effect(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body without fields of `WITHOUT_EFFECT` and fields that are null, [] or {}. Items of arrays stay."""
    return _object_with_effect(body, 0)


def _with_effect(value: Any, depth: int) -> Any:
    if depth < MAX_DEPTH:
        if isinstance(value, dict):
            return _object_with_effect(value, depth)
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):  # no token ids
            return [_with_effect(item, depth + 1) for item in value]
    return value


def _object_with_effect(value: dict[str, Any], depth: int) -> dict[str, Any]:
    kept = {}
    for name, inner in value.items():
        if name in WITHOUT_EFFECT:
            continue
        if not (name in USER_DATA and isinstance(inner, dict)):
            inner = _with_effect(inner, depth + 1)
            if inner in EMPTY:
                continue
        kept[name] = inner
    return kept
