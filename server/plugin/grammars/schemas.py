"""Refuse or drop parts of JSON schemas that xgrammar would ignore."""

from collections.abc import Iterator
from typing import Any

from .patterns import without_anchors

NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("const", "enum", "default", "examples")
"""Keywords with values, which are no schemas even if they look like one."""
ALONE = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords that make xgrammar ignore all constraints next to them."""
TYPED = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format"),
    *("minItems", "maxItems", "minProperties", "maxProperties", "required"),
}
"""Constraints that xgrammar ignores without a type."""
CONSTRAINTS = TYPED | {
    *("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "propertyNames")
}


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a JSON schema and the schemas within it."""
    if isinstance(schema, list):
        for each in schema:
            yield from subschemas(each)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in NAMED_SCHEMAS and isinstance(value, dict):
                yield from subschemas([*value.values()])
            elif key not in VALUES:
                yield from subschemas(value)


def rewrite_patterns(schema: Any) -> None:
    """Take anchors out of the patterns of a schema; raises ValueError like `without_anchors`."""
    for each in subschemas(schema):
        if isinstance(pattern := each.get("pattern"), str):
            each["pattern"] = without_anchors(pattern)
        if isinstance(named := each.get("patternProperties"), dict):
            each["patternProperties"] = {without_anchors(name): value for name, value in named.items()}


def check(schema: Any) -> None:
    """Raise ValueError for a constraint that xgrammar would ignore and SGLang does not refuse."""
    for each in subschemas(schema):
        alone = [keyword for keyword in ALONE if keyword in each]
        if alone and (beside := [*alone[1:], *sorted(CONSTRAINTS.intersection(each))]):
            raise ValueError(f"{beside[0]!r} beside {alone[0]!r} would be ignored; write it into each branch")
        if isinstance(branches := each.get("allOf"), list) and len(branches) > 1:
            raise ValueError("'allOf' with more than one branch would be ignored; write one schema")
        typed = {"type", "properties", "enum", "const"}.isdisjoint(each) and TYPED.intersection(each)
        if typed:
            raise ValueError(f"{min(typed)!r} would be ignored without a 'type'")


def relax(schema: Any) -> None:
    """Drop parts of a schema that cannot be enforced or make xgrammar ignore other constraints."""
    for each in subschemas(schema):
        if "properties" in each:
            for keyword in ALONE:
                each.pop(keyword, None)
        for keyword in {"pattern", "patternProperties"}.intersection(each):
            try:
                rewrite_patterns({keyword: each[keyword]})
            except ValueError:
                del each[keyword]
