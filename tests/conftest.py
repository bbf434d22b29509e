"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from running import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that most tests share. Its KV cache holds 4096 tokens, and so does its context."""
    started = Server(tmp_path_factory.mktemp("server") / "log", "--max-total-tokens", "4096", "--max-choices", "16")
    try:
        yield started.wait_until_ready()
    finally:
        started.stop()


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def model(client: openai.OpenAI) -> str:
    """Name of the served model."""
    return client.models.list().data[0].id


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="all prompts one at a time as well, which takes long on a CPU"
    )
