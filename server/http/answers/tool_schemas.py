"""Schemas of tools as a grammar enforces them in a call that the request forces, strict or not."""

import copy
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool

from ...plugin.grammars import schemas


def enforced(tool: Tool) -> Tool:
    """The tool as a strict one whose arguments are always an object.

    Unless it was strict, its schema loses what no grammar enforces instead of being refused.
    """
    schema = copy.deepcopy(tool.function.parameters or {})
    if not tool.function.strict:
        schemas.relax(schema)
    _have_object(schema)
    function = tool.function.model_copy(update={"parameters": schema, "strict": True})
    return tool.model_copy(update={"function": function})


def _have_object(schema: Any) -> None:
    """Have xgrammar admit objects alone; beside branches it ignores a type."""
    if isinstance(schema, dict):
        schema["type"] = "object"
        for branch in (branch for keyword in ("anyOf", "oneOf", "allOf") for branch in schema.get(keyword) or ()):
            _have_object(branch)
