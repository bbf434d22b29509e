"""Health, readiness, metrics, and the reach of the server."""

import re

from metrics_page import metric
from running import HTTP, Server


def test_health_and_ready(server: Server) -> None:
    assert HTTP.get(server.url + "/health").json() == {"status": "ok", "dead_processes": []}
    assert HTTP.get(server.url + "/ready").json() == {"status": "ready"}


def test_health_generates_no_tokens(server: Server) -> None:
    def generated() -> float:
        return metric(server.url, "sglang:prompt_tokens_total")

    before = generated()
    for _ in range(5):
        assert server.status("/health") == 200
    assert generated() == before


def test_known_routes_are_counted_by_path_and_unknown_ones_together(server: Server) -> None:
    unknown = ("/v1/made-up", "/v1/embeddings", "/v1/models/made-up")
    for path in ("/ready", "/outrider/live", "/openapi.json", *unknown):
        HTTP.get(server.url + path)
    counted = set(re.findall(r'outrider_http_requests_total{path="([^"]*)"', HTTP.get(server.url + "/metrics").text))
    assert counted >= {"/ready", "/outrider/live", "/openapi.json", "other"}
    assert not counted & {*unknown}
