"""Grammars in the form given to xgrammar."""

import json
from typing import Any

from xgrammar import StructuralTag, StructuralTagItem

from .patterns import without_anchors
from .schemas import rewrite_patterns


def rewritten(kind: str, text: str, max_whitespace: int | None = None) -> str:
    """Return the grammar without anchors, of which xgrammar warns, and with a bound on white space in tools' JSON.

    kind: json, regex, ebnf or structural_tag.
    max_whitespace: the bound for JSON schemas, which SGLang does not apply to structural tags.
    Raises ValueError for patterns that cannot be enforced.
    """
    if kind == "regex":
        return without_anchors(text)
    if kind == "json" and "attern" in text:  # the rest stays: xgrammar reads numbers differently from Python
        schema = json.loads(text)
        rewrite_patterns(schema)
        return json.dumps(schema)
    if kind == "structural_tag":
        tag = _current(json.loads(text))
        _rewrite_tag(tag.get("format"), max_whitespace)
        return json.dumps(tag)
    return text


def _current(tag: dict[str, Any]) -> dict[str, Any]:
    """Return a structural tag in xgrammar's current form, converted as in SGLang's backend."""
    if (structures := tag.get("structures")) is None:
        return tag
    items = [
        StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"] or {}), end=item["end"])
        for item in structures
    ]
    current = StructuralTag.from_legacy_structural_tag(items, tag["triggers"]).model_dump()
    current["format"]["at_least_one"] = tag.get("at_least_one", False)
    return current


def _rewrite_tag(node: Any, max_whitespace: int | None) -> None:
    """Rewrite the JSON schemas in a structural tag's format."""
    if isinstance(node, list):
        for each in node:
            _rewrite_tag(each, max_whitespace)
    elif isinstance(node, dict) and node.get("type") == "json_schema":
        node["json_schema"] = {} if node.get("json_schema") is None else node["json_schema"]
        node["max_whitespace_cnt"] = node.get("max_whitespace_cnt") or max_whitespace
        rewrite_patterns(node["json_schema"])
    elif isinstance(node, dict):
        for each in node.values():
            _rewrite_tag(each, max_whitespace)
