"""A server on which answers can be compared to the last bit: float32, no shared prefixes, a small cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Server


@pytest.fixture(scope="session")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its cache holds 3072 tokens: enough for eight requests of these tests, not for twenty-four.

    Most prompts are longer than the 32 tokens of a prefill step, so they are prefilled in chunks.
    """
    flags = ["--dtype", "float32", "--disable-radix-cache", "--max-total-tokens", "3072", "--drafter", "ngram"]
    flags += ["--chunked-prefill-size", "32"]
    started = Server(tmp_path_factory.mktemp("exact") / "log", *flags)
    try:
        yield started.wait_until_ready()
    finally:
        started.stop()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Fifty prompts: code, arithmetic, chat. A line that begins with a space or is empty belongs to the one before."""
    found: list[str] = []
    for line in Path(__file__).with_name("prompts.txt").read_text().splitlines():
        if found and (line.startswith(" ") or line == "" or found[-1].endswith("\n")):
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found
