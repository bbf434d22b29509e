"""Drafters are promoted while requests run, rolled back, and kept over a kill: no text changes."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from asking import complete, tokens
from learned_drafters import offer, wait_for_state, wait_until_tried
from metrics_page import MetricsPage, documented, metric
from running import HTTP, Server, wait_until
from small_target import SmallTarget

pytestmark = pytest.mark.server
TOKENS = 60
BODIES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]
STEPS = 200
"""A worse drafter is rolled back within this many steps of a request."""


def answers(server: Server, prompts: list[str], *, speculate: bool, at_once: int = 1) -> list[list[int]]:
    asked = [(prompt, body) for prompt in prompts for body in BODIES]

    def ask(one: tuple[str, dict[str, Any]]) -> list[int]:
        return tokens(complete(server, one[0], speculate=speculate, max_tokens=TOKENS, ignore_eos=True, **one[1]))

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, asked))


@pytest.mark.parametrize("drafter", ["dspark", "specdiff"], indirect=True)  # test_failures.py: "eagle3"
def test_no_text_changes_while_drafters_are_exchanged_and_taken_back(
    start_learning: Callable[[], Server], small_target: SmallTarget, drafter: str, prompts: list[str], tmp_path: Path
) -> None:
    folder, some = tmp_path / "learned", prompts[:6]
    server = start_learning()
    plain = answers(server, some, speculate=False, at_once=4)
    assert answers(server, some, speculate=True, at_once=4) == plain
    first = "outrider_accepted_position_total"
    assert metric(server.url, first, source="model", position="1") > 64  # the acceptance of the drafter in use is known

    offer(folder, "0001", small_target, broken=True, drafter=drafter)
    with ThreadPoolExecutor(1) as pool:
        while_exchanged = pool.submit(answers, server, some, speculate=True, at_once=2)
        wait_until_tried(folder, "0001")
        assert while_exchanged.result() == plain
    before = metric(server.url, "outrider_request_steps_total")
    while metric(server.url, "outrider_request_steps_total") - before < STEPS - 2 * TOKENS:
        assert answers(server, some[:1], speculate=True) == plain[:2]
    wait_for_state(folder, in_use=None, refused=["0001"])
    assert "is taken back" in server.output()
    assert answers(server, some, speculate=True, at_once=4) == plain
    assert metric(server.url, "outrider_learn_rollbacks_total") == 1

    (folder / "drafters" / "0002").mkdir()  # a folder without a drafter is refused
    wait_for_state(folder, in_use=None, refused=["0001", "0002"])
    offer(folder, "0003", small_target, broken=False, drafter=drafter)
    wait_for_state(folder, in_use="0003", refused=["0001", "0002"])
    children = psutil.Process(server.process.pid).children()
    learner = [child for child in children if "learning.process" in " ".join(child.cmdline())]
    assert len(learner) == 1
    server.process.kill()
    psutil.wait_procs(learner, timeout=60)  # it runs at the lowest priority, so it ends slowly
    assert not learner[0].is_running()

    server = start_learning()
    assert answers(server, some, speculate=True, at_once=4) == plain
    wait_until(lambda: metric(server.url, "outrider_learn_in_use") == 3, 60)
    metrics = {name for name in MetricsPage(server.url).families if name.startswith("outrider_learn_")}
    assert metrics == set(documented("metric of a server that learns"))
    assert json.loads((folder / "state.json").read_text()) == {"in_use": "0003", "refused": ["0001", "0002"]}


def test_requests_that_refuse_are_not_stored(start_learning: Callable[[], Server], tmp_path: Path) -> None:
    server = start_learning()
    for number, (headers, body) in enumerate([({"X-Outrider-Learn": "off"}, {}), ({}, {"store": False}), ({}, {})]):
        request = {"messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 9, "ignore_eos": True}
        answer = HTTP.post(f"{server.url}/v1/chat/completions", json=request | body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
    answer = HTTP.post(
        f"{server.url}/v1/chat/completions", json=request, headers={"X-Outrider-Learn": "perhaps"}, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert server.stop() == 0  # answers may be written to disk until then
    kept = [line for path in (tmp_path / "learned" / "answers").iterdir() for line in path.read_text().splitlines()]
    assert len(kept) == 1
    assert (tmp_path / "learned").stat().st_mode & 0o077 == 0
