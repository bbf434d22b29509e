"""What is hooked into SGLang."""

from __future__ import annotations

import ast
from importlib.metadata import distribution
from pathlib import Path

from outrider.server.plugin.hooks.register import Once


def test_once_for_the_same_arguments() -> None:
    calls = []

    def load(path: str, **options: object) -> object:
        calls.append((path, options))
        return object()

    once = Once()
    first = once(load, "model", mode="auto", revision=None)
    assert once(load, "model", revision=None, mode="auto") is first
    assert once(load, "model", mode="slow", revision=None) is not first
    assert len(calls) == 2


def test_scheduler_and_worker_ask_for_the_same_tokenizer() -> None:
    asked = []
    for module in ("scheduler", "tp_worker"):
        source = Path(str(distribution("sglang").locate_file(f"sglang/srt/managers/{module}.py"))).read_text()
        asked.append(
            {
                ast.unparse(node)
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_tokenizer"
            }
        )
    assert len(asked[0]) == 1
    assert asked[0] == asked[1]
