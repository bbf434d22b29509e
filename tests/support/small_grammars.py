"""Grammars, a small vocabulary for which they compile in milliseconds, and refusals."""

import json
import string
from typing import Any

import httpx
import numpy as np
import xgrammar

from outrider.server.plugin.grammars.folder import CompileOptions, GrammarFolder

STOP = 0


def vocabulary(size: int = 4000) -> list[str]:
    """A stop token, every printable character, and words of letters."""
    random = np.random.default_rng(0)
    letters = np.array(list(string.ascii_lowercase))
    words = {"".join(random.choice(letters, length)) for length in random.integers(2, 9, size)}
    return ["</s>", *string.printable, *sorted(words)][:size]


def tokenizer() -> xgrammar.TokenizerInfo:
    return xgrammar.TokenizerInfo(vocabulary(), stop_token_ids=[STOP])


def options() -> CompileOptions:
    return CompileOptions(tokenizer().serialize_json())


def with_options(folder: GrammarFolder) -> GrammarFolder:
    """The folder, with the files that a scheduler writes into it."""
    folder.write_options(options())
    return folder


def nested_repeats(depth: int, end: str = "") -> str:
    """A regular expression that compiles at once and is followed ever more slowly."""
    return "(" * depth + "[a-z]" + "){1,20}" * depth + end


def small_schema(name: str) -> str:
    properties: dict[str, Any] = {name: {"type": "string"}, "age": {"type": "integer"}}
    return json.dumps({"type": "object", "properties": properties, "required": [name, "age"]})


def slow_schema(strings: int = 280) -> str:
    """Takes minutes and much memory to compile for a real model; 12 KB with this many strings."""
    properties = {f"f{index}": {"type": "string", "maxLength": 500 + index} for index in range(strings)}
    return json.dumps({"type": "object", "properties": properties})


def assert_refused(response: httpx.Response, param: str, *, may_be_busy: bool = False) -> None:
    """A 400 that names the field; may_be_busy: or a 429, as other work runs too."""
    error = response.json()["error"]
    if may_be_busy and response.status_code == 429:
        assert error["code"] == "grammars_busy"
        return
    assert response.status_code == 400, response.text
    assert error["code"] == "invalid_grammar", error
    assert error["param"] == param
    assert "\n" not in error["message"]
