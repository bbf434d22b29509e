"""Prometheus metrics of the HTTP layer, and the page that shows them with the engine's.

SGLang's processes and ours write to files in one folder (prometheus_client's multiprocess mode); the folder is named
in the environment by SGLang before anything here is imported.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest, multiprocess

# Anything else is counted as "other": clients choose paths, and must not choose how many series there are.
PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/ready",
        "/metrics",
        "/outrider/tune",
        "/docs",
        "/openapi.json",
    }
)


class HttpMetrics:
    """Counters of answered requests."""

    def __init__(self) -> None:
        self._requests = Counter(
            "outrider_http_requests", "HTTP requests answered, by path and status.", ["path", "status"]
        )

    def finished(self, path: str, status: int) -> None:
        self._requests.labels(path if path in PATHS else "other", str(status)).inc()


def render() -> tuple[bytes, str]:
    """Page and content type. A fresh registry each time, as the multiprocess mode wants."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
