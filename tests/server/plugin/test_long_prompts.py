"""A long prompt is read beside other requests: their answers go on, and a short prompt passes it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from asking import MODEL, complete
from metrics_page import MetricsPage
from running import HTTP, Server


@pytest.mark.server
def test_answers_go_on_and_a_short_prompt_passes(server: Server) -> None:
    draw = random.Random(1)
    long = [draw.randrange(100, 40000) for _ in range(2600)]
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    before, ended = MetricsPage(server.url), list[str]()

    def ask(name: str, prompt: list[int]) -> None:
        complete(server, prompt, speculate=True, max_tokens=1)
        ended.append(name)

    with (
        HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer,
        ThreadPoolExecutor(2) as pool,
    ):
        lines = answer.iter_lines()
        list(islice(lines, 10))
        reading = pool.submit(ask, "long", long)
        list(islice(lines, 40))  # all of them while the long prompt is read, or it would be over before the short one
        pool.submit(ask, "short", long[-20:]).result()
        seen = sum(1 for _ in islice(lines, 20))
        assert not reading.done()
        reading.result()
    assert seen == 20
    assert ended == ["short", "long"]
    after = MetricsPage(server.url)
    assert after.value("outrider_prefill_chunk_tokens_sum") - before.value("outrider_prefill_chunk_tokens_sum") > 2600
    assert after.value("outrider_prefill_chunk_tokens_count") - before.value("outrider_prefill_chunk_tokens_count") > 5
