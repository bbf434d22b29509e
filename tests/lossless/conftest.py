"""A server on which answers can be compared to the last bit: float32, no shared prefixes, a small cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Server

EXACT = ("--dtype", "float32", "--disable-radix-cache", "--max-total-tokens", "3072", "--chunked-prefill-size", "32")
"""A cache for eight requests of these tests, not for twenty-four; most prompts are prefilled in several chunks."""


@pytest.fixture(scope="session")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("exact") / "log", "ngram")


@pytest.fixture(scope="session")
def dspark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Drafts with a model: sampled drafts with a distribution of their own, over a truncated vocabulary."""
    yield from _serve(tmp_path_factory.mktemp("dspark") / "log", "dspark")


def _serve(log: Path, drafter: str) -> Iterator[Server]:
    started = Server(log, *EXACT, "--drafter", drafter)
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
