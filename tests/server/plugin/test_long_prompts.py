"""While a long prompt is read, answers continue, and a short prompt passes it."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import MODEL, complete
from metrics_page import MetricsPage
from running import HTTP, Server, wait_until


@pytest.mark.server
def test_answers_go_on_and_a_short_prompt_passes(server: Server) -> None:
    draw = random.Random(1)
    long = [draw.randrange(100, 40000) for _ in range(2600)]
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    before, events, tokens = MetricsPage(server.url), list[str](), "outrider_prefill_chunk_tokens_sum"

    def stream() -> None:
        with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                events.append("piece" if line else "")
                if "long" in events:
                    return

    def ask(name: str, prompt: list[int]) -> None:
        complete(server, prompt, speculate=True, max_tokens=1)
        events.append(name)

    with ThreadPoolExecutor(3) as pool:
        pool.submit(stream)
        wait_until(lambda: len(events) >= 10, 60)
        events.append("sent")
        pool.submit(ask, "long", long)
        wait_until(lambda: MetricsPage(server.url).value(tokens) - before.value(tokens) > 100, 60)
        pool.submit(ask, "short", long[-20:])
    beside = events[events.index("sent") : events.index("long")]
    assert "short" in beside
    assert beside.count("piece") >= 10
