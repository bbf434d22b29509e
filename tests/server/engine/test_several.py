"""Two engines behind one address."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from asking import complete_all, counter, tokens
from running import Server, wait_until

from outrider.server.engine import topology

pytestmark = pytest.mark.skipif(len(topology.here().cores) < 2, reason="needs two cores")
PROMPTS = [f"Tell me about the number {number}." for number in range(8)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("several") / "log"
    started = Server(log, "--engines", "2", "--max-total-tokens", "4096")
    try:
        yield started.wait_until_ready()
    finally:
        started.kill()


def schedulers(server: Server) -> list[psutil.Process]:
    return [process for name, process in server.children().items() if name.startswith("scheduler")]


def test_an_answer_is_the_same_from_any_engine(server: Server) -> None:
    body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    together = complete_all(server, PROMPTS * 2, 16, speculate=True, **body)
    alone = complete_all(server, PROMPTS, 1, speculate=False, **body)
    assert [tokens(answer) for answer in together] == [tokens(answer) for answer in alone] * 2
    requests = [counter(server, "sglang:queue_time_seconds_count", dp_rank=str(engine)) for engine in range(2)]
    assert min(requests) >= len(PROMPTS) / 2


def test_each_engine_stays_on_cores_of_its_own(server: Server) -> None:
    first, second = (set(process.cpu_affinity()) for process in schedulers(server))
    assert first
    assert second
    assert not first & second
    for process, own in zip(schedulers(server), (first, second), strict=True):
        for thread in process.threads():
            assert set(psutil.Process(thread.id).cpu_affinity()) <= own


def test_a_killed_engine_ends_the_server(server: Server) -> None:
    """Last: nothing answers after it."""
    victim, *others = schedulers(server)
    victim.kill()
    wait_until(lambda: server.process.poll() is not None, 30)
    assert server.process.returncode == 1
    assert "Traceback" not in server.output()
    wait_until(lambda: not any(process.is_running() for process in others), 5)
