"""Health and metrics of a real server: correct counts, of bounded size."""

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from asking import MODEL, asked, complete
from fastapi import FastAPI
from in_loop import in_loop
from metrics_page import TABLES, MetricsPage, documented, metric
from running import HTTP, Server, wait_until

from outrider.server.http.routes import health

ENDLESS = {"model": MODEL, "prompt": "Count: 1, 2, 3,", "max_tokens": 3000, "ignore_eos": True}


def ended(server: Server, outcome: str) -> float:
    return metric(server.url, "outrider_request_seconds_count", outcome=outcome)


def test_the_table_names_every_metric_of_ours_and_its_kind(server: Server) -> None:
    families = MetricsPage(server.url).families
    kinds = {name: family.type for name, family in families.items() if name.startswith("outrider_")}
    # Metrics of keys need keys: test_limits.py.
    named = {name: kind for name, (kind, _) in documented("metric").items() if not name.startswith("outrider_key_")}
    assert named == kinds


def test_the_metrics_of_sglang_in_the_table_are_there(server: Server) -> None:
    for _ in range(2):
        body = ENDLESS | {"max_tokens": 8, "stream": True}
        assert HTTP.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    families = MetricsPage(server.url).families
    named = set(re.findall(r"`(sglang:\w+)", TABLES))
    assert len(named) > 8
    missing = {name for name in named if name not in families and name.removesuffix("_total") not in families}
    assert missing <= {"sglang:num_retracted_requests_total"}  # appears with the first one


def test_health_and_ready_generate_no_tokens(server: Server) -> None:
    before = metric(server.url, "sglang:prompt_tokens_total")
    assert HTTP.get(server.url + "/health").json() == {"status": "ok", "dead_processes": []}
    assert HTTP.get(server.url + "/ready").json() == {"status": "ready"}
    assert metric(server.url, "sglang:prompt_tokens_total") == before


@in_loop
async def test_a_scrape_does_not_wait_for_clients_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads of the loop are busy with grammars."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    app, done = FastAPI(), threading.Event()
    health.install_metrics(app)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    checking = loop.run_in_executor(None, done.wait)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            assert (await client.get("/metrics")).status_code == 200
    finally:
        done.set()
        await checking


def test_requests_are_counted_by_outcome(server: Server) -> None:
    before = {outcome: ended(server, outcome) for outcome in ("completed", "cancelled", "refused", "failed")}
    complete(server, "one", speculate=True, max_tokens=4)
    HTTP.post(f"{server.url}/v1/completions", json={"max_tokens": "many"}, timeout=20)
    with asked(server, "/v1/completions", ENDLESS):
        wait_until(lambda: metric(server.url, "outrider_requests_in_flight") >= 1, 30)
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert metric(server.url, "outrider_requests_in_flight") >= 1
    expected = {"completed": 1, "cancelled": 2, "refused": 1, "failed": 0}
    wait_until(lambda: ended(server, "cancelled") == before["cancelled"] + 2, 30)
    assert {outcome: ended(server, outcome) - before[outcome] for outcome in expected} == expected
    wait_until(lambda: metric(server.url, "outrider_requests_in_flight") == 0, 30)


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_per_token_is_what_the_client_sees(server: Server, stream: bool) -> None:
    def taken() -> tuple[float, float]:
        name = "outrider_time_per_output_token_seconds"
        return metric(server.url, f"{name}_sum"), metric(server.url, f"{name}_count")

    body = ENDLESS | {"max_tokens": 60, "temperature": 0, "stream": stream}

    def answered() -> tuple[float, float]:
        seconds, count = taken()
        began = time.monotonic()
        assert HTTP.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
        whole = time.monotonic() - began
        wait_until(lambda: taken()[1] == count + 1, 30)
        return whole, taken()[0] - seconds

    for _ in range(3):
        whole, per_token = answered()
        # 60 tokens that came together would be far below
        if 0.2 * whole < 59 * per_token:
            break
    assert 0.2 * whole < 59 * per_token <= whole


def test_answers_that_are_cut_off_count_for_no_service_level(server: Server) -> None:
    def counts() -> list[float]:
        levels = [metric(server.url, "outrider_service_level_requests_total", met=met) for met in ("true", "false")]
        return [*levels, metric(server.url, "outrider_goodput_tokens_total")]

    before = counts()
    cancelled = ended(server, "cancelled")
    body = ENDLESS | {"stream": True, "min_tokens_per_second": 1e6}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    wait_until(lambda: ended(server, "cancelled") == cancelled + 1, 30)
    assert counts() == before
    for level, expected in ((1e6, [0, 1, 0]), (0.01, [1, 0, 8])):
        before = counts()
        complete(server, "two", speculate=True, max_tokens=8, ignore_eos=True, min_tokens_per_second=level)
        assert [now - then for now, then in zip(counts(), before, strict=True)] == expected


def test_decoded_tokens_are_the_answers_tokens(server: Server) -> None:
    """They exclude the first token, which the prefill draws."""

    def counts() -> list[float]:
        sglang = metric(server.url, "sglang:realtime_tokens_total", mode="decode")
        return [sglang, metric(server.url, "outrider_accepted_length_sum")]

    before = counts()
    for speculate in (True, False):
        complete(server, "1 2 3 1 2 3 1 2 3", speculate=speculate, max_tokens=33, ignore_eos=True, temperature=0)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [64, 64]


def test_clients_cannot_make_series(server: Server) -> None:
    """Paths, models and ids are odd, two hundred of them."""

    def series() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        families = MetricsPage(server.url).families.values()
        samples = [sample for family in families for sample in family.samples]
        return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples}

    with httpx.Client(base_url=server.url, timeout=60) as client:

        def odd(number: int) -> None:
            name = f"odd-{number}"
            headers = {"X-Request-Id": name, "X-Custom-Labels": f'{{"tenant": "{name}"}}', "X-Smg-Routing-Key": name}
            body = {"model": name, "prompt": "x", "max_tokens": 1, "user": name}
            client.post(f"/v1/{name}", json=body, headers=headers)
            for path in (f"/{name}?{name}={name}", f"/v1/models/{name}", "/v1/models", "/outrider/live"):
                client.get(path, headers=headers)
            client.post("/v1/completions", json=body, headers=headers)
            if number % 50 == 0:
                client.post("/v1/completions", json=body | {"model": MODEL}, headers=headers)

        series()  # the page is a known route too
        odd(0)
        before = series()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(odd, range(200)))
    assert series() == before
    counted = {dict(labels)["path"] for name, labels in before if name == "outrider_http_requests_total"}
    assert counted >= {"/v1/models", "/outrider/live", "/v1/completions", "other"}
    assert not [path for path in counted if "odd" in path]
