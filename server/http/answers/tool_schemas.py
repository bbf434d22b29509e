"""Adapt the schemas of tools, strict or not, to a grammar that enforces them in forced calls."""

import copy
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool

from ...plugin.grammars import schemas


def enforced(tool: Tool) -> Tool:
    """Return the tool as a strict one that takes an object. Drops the parts of its schema that no grammar enforces,
    unless it was strict: a strict tool with such parts is refused."""
    schema = copy.deepcopy(tool.function.parameters or {})
    if not tool.function.strict:
        schemas.relax(schema)
    _have_object(schema)
    function = tool.function.model_copy(update={"parameters": schema, "strict": True})
    return tool.model_copy(update={"function": function})


def _have_object(schema: Any) -> None:
    """Let xgrammar admit objects only; it ignores a type next to branches."""
    if isinstance(schema, dict):
        schema["type"] = "object"
        for branch in (branch for keyword in ("anyOf", "oneOf", "allOf") for branch in schema.get(keyword) or ()):
            _have_object(branch)
