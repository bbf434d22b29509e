"""A schema's constraints are enforced, refused or without effect; patterns match whole texts."""

import copy
import json
import re
from typing import Any

import jsonschema
import pytest
import xgrammar
from sglang.srt.constrained.json_schema_validation import validate_xgrammar_json_schema
from small_grammars import tokenizer

from outrider.server.plugin.grammars import schemas
from outrider.server.plugin.grammars.patterns import without_anchors
from outrider.server.plugin.grammars.rewrite import rewritten

COMPILER = xgrammar.GrammarCompiler(tokenizer(), max_threads=1, cache_enabled=False)
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
WITH_A = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False}


def accepts(kind: str, grammar: str, text: str, space: int | None = None) -> bool:
    grammar = rewritten(kind, grammar, space)
    if kind == "regex":
        compiled = COMPILER.compile_regex(grammar)
    elif kind == "json":
        compiled = COMPILER.compile_json_schema(grammar, max_whitespace_cnt=space)
    else:
        compiled = COMPILER.compile_structural_tag(grammar)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_terminated()


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        ("^a$|^b$", "a b", "ab c"),
        ("^a|b$", "a b", "ab"),
        ("^(a|bc)$", "a bc", "abc"),
        (r"\^[$^]\$", "^$$ ^^$", "$$"),
        (r"[\]$]+", "]$", "a"),
        ("a|b|$", "a b", "ab"),
    ],
)
def test_anchors_around_all_have_no_effect(
    pattern: str, fits: str, fails: str, capfd: pytest.CaptureFixture[str]
) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    for text in fits.split():
        assert re.search(pattern, text)
        assert accepts("regex", pattern, text)
        assert accepts("json", schema, json.dumps(text))
    for text in fails.split():
        assert not accepts("regex", pattern, text)
        assert not accepts("json", schema, json.dumps(text))
    assert "arning" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "pattern", ["a^b", "a$b", "(^a|b)", "(a$|b)c", "^^a", r"\Aa", r"a\b", "(?=a)a", "(?<!a)b", r"(a)\1"]
)
def test_other_anchors_and_lookaround_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        without_anchors(pattern)


@pytest.mark.parametrize(
    ("schema", "broken"),
    [
        ({"type": "object", "allOf": [WITH_A, {"required": ["a"]}]}, {}),
        (WITH_A | {"allOf": [{"required": ["a"]}]}, {}),
        (WITH_A | {"anyOf": [{"required": ["a"]}]}, {}),
        (WITH_A | {"oneOf": [{"type": "object"}]}, {"b": 1}),
        ({"anyOf": [INTEGER, STRING], "maximum": 3}, 4),
        ({"$ref": "#/$defs/q", "$defs": {"q": STRING}, "maxLength": 1}, "ab"),
        ({"minimum": 2}, 1),
        ({"maxLength": 1}, "ab"),
        ({"pattern": "^a$"}, "b"),
        ({"required": ["a"]}, {}),
        ({"minItems": 1}, []),
        (STRING | {"pattern": "^[a-z]+$", "maxLength": 1}, "ab"),
        (STRING | {"pattern": "(?=x)a"}, "a"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 1]),
        (WITH_A, {"a": "x"}),
        (WITH_A | {"required": ["a"]}, {}),
        ({"type": "array", "maxItems": 1}, [1, 2]),
        (INTEGER | {"minimum": 2}, 1),
        ({"properties": {"default": {"pattern": "^a$"}}}, {"default": "b"}),
    ],
    ids=json.dumps,
)
def test_a_constraint_is_enforced_or_refused(schema: Any, broken: Any) -> None:
    assert not jsonschema.Draft202012Validator(schema).is_valid(broken)
    try:
        validate_xgrammar_json_schema(schema)
        schemas.check(schema)
        text = rewritten("json", json.dumps(schema))
    except ValueError:
        return
    assert not accepts("json", text, json.dumps(broken))


def test_values_are_no_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"const": {"pattern": "a$b", "minimum": 1}}}}
    schemas.check(schema)
    before = copy.deepcopy(schema)
    schemas.relax(schema)
    assert schema == before == json.loads(rewritten("json", json.dumps(schema)))


def test_tools_json_has_bounded_white_space() -> None:
    structure = {"begin": "<a>", "schema": WITH_A, "end": "</a>"}
    legacy = {"type": "structural_tag", "structures": [structure], "triggers": ["<a>"], "at_least_one": True}
    content = {"type": "json_schema", "json_schema": WITH_A}
    current = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    for tag in map(json.dumps, (legacy, current)):
        assert accepts("structural_tag", tag, '<a>{"a":' + " " * 8 + "1}</a>", space=8)
        assert not accepts("structural_tag", tag, '<a>{"a":' + " " * 9 + "1}</a>", space=8)
        assert not accepts("structural_tag", tag, '<a>{"a":"x"}</a>', space=8)
