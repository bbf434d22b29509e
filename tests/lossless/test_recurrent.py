"""A tiny model with recurrent layers and experts, in float32: answers with speculation are those without it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tiny_families
from asking import MODEL, complete, tokens
from metrics_page import MetricsPage
from running import ONE_THREAD, ForkedServer, Server

FEW = [33, 200, 54, 77, 93]
BODY = {"temperature": 0, "ignore_eos": True, "logit_bias": dict.fromkeys(map(str, FEW), 100.0)}
"""Answers are of a few tokens alone: they repeat themselves, so that much is drafted, and much of it wrong."""
LENGTHS = [3, 64, 65, 150, 1, 31, 129, 90, 12, 77]
"""Of prompts; those above 64 are read in pieces."""
ANSWERS = [60, 1, 48, 60, 60, 2, 60, 33, 60, 60]
ASKED = [([(7 * i * i + n) % 250 + 17 for i in range(n)], answer) for n, answer in zip(LENGTHS, ANSWERS, strict=True)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("recurrent")
    tiny_families.write("Qwen3NextForCausalLM", folder / "tiny")
    server = ForkedServer(
        folder / "log", "--model", str(folder / "tiny"), "--served-model-name", MODEL, "--dtype", "float32",
        "--max-total-tokens", "640", "--max-running-requests", "8", "--chunked-prefill-size", "64", *ONE_THREAD,
    )  # fmt: skip
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def plain(served: Server) -> list[list[int]]:
    """Answers without speculation, one at a time."""
    assert "prompts share no prefixes" in served.output()
    return [ask(served, one, speculate=False) for one in ASKED]


def ask(served: Server, one: tuple[list[int], int], *, speculate: bool) -> list[int]:
    return tokens(complete(served, one[0], speculate=speculate, max_tokens=one[1], **BODY))


def test_one_at_a_time(served: Server, plain: list[list[int]]) -> None:
    before = MetricsPage(served.url)
    assert [ask(served, one, speculate=True) for one in ASKED] == plain
    after = MetricsPage(served.url)
    for name in ("accepted", "wasted"):  # states went on by both kinds of steps
        name = f"outrider_{name}_tokens_total"
        assert after.value(name) - before.value(name) > 20


def test_many_at_once_in_a_cache_too_small_for_all(served: Server, plain: list[list[int]]) -> None:
    """Some requests speculate, some are retracted and start again, and some leave in the middle: who gets their rows
    has none of their state."""
    asked = [*ASKED, *reversed(ASKED)]
    with ThreadPoolExecutor(len(asked) + 4) as pool:
        leaving = [pool.submit(leave, served, one) for one in ASKED[:4]]
        found = list(pool.map(lambda i: ask(served, asked[i], speculate=i % 3 > 0), range(len(asked))))
        assert all(each.result() for each in leaving)
    assert found == [*plain, *reversed(plain)]
    assert MetricsPage(served.url).value("sglang:num_retracted_requests_total") > 0
    assert [ask(served, one, speculate=True) for one in ASKED] == plain


def leave(served: Server, one: tuple[list[int], int]) -> bool:
    """Ask for a long answer, and hang up at its first token."""
    body = {"model": MODEL, "prompt": one[0], "max_tokens": 300, "stream": True, **BODY}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as answer:
        return any(line.startswith("data:") for line in answer.iter_lines())
