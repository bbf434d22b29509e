from collections.abc import Iterator

import pytest
from running import ForkedServer, Server


@pytest.fixture(scope="package")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with its sampling, and a tool-call parser enforced by a grammar."""
    log = tmp_path_factory.mktemp("tools") / "log"
    flags = ("--max-total-tokens", "4096", "--tool-call-parser", "hermes", "--planner", "verify-all")
    flags += ("--sampling-defaults", "model")
    with ForkedServer(log, *flags) as started:
        yield started
