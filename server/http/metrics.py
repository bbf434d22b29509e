"""Prometheus metrics of the HTTP layer, and their page, which also shows the engine's.

SGLang's processes and ours write to files in one folder (prometheus_client's multiprocess mode). SGLang makes a new
folder at every start, and names it in the environment before this module is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

from ..plugin.buckets import REQUEST_SECONDS, TOKEN_SECONDS

if TYPE_CHECKING:
    from .keys.admission import RequestAdmission

ANSWERING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
MOST_KEYS = 100
OTHER = "other"
"""Label of paths without a route, and of keys beyond MOST_KEYS: each key has four series."""
OUTCOMES = ("completed", "cancelled", "refused", "overloaded", "failed")


class HttpMetrics:
    """Answered and running requests, and `outrider_info`.

    about: labels of `outrider_info`. paths: paths with a series of their own. The rest share "other", because
        clients choose paths and must not choose the number of series. max_pause: seconds; 0: pauses are not bounded.
    """

    def __init__(self, about: Mapping[str, str], paths: Collection[str], max_pause: float) -> None:
        self._paths = paths
        info = Gauge("outrider_info", "1, with what is served and how.", list(about), multiprocess_mode="max")
        info.labels(*about.values()).set(1)
        started = Gauge("outrider_start_time_seconds", "When the server was started.", multiprocess_mode="max")
        started.set_to_current_time()
        bound = Gauge("outrider_max_pause_seconds", "--max-pause; 0: off.", multiprocess_mode="max")
        bound.set(max_pause)
        self._requests = Counter(
            "outrider_http_requests", "HTTP requests answered, by path and status.", ["path", "status"]
        )
        self._in_flight = Gauge(
            "outrider_requests_in_flight",
            "Requests for completions that have come whole and are not answered yet.",
            multiprocess_mode="livesum",
        )
        seconds = Histogram(
            "outrider_request_seconds",
            "From a request for completions to the end of its answer, by how it ended.",
            ["outcome"],
            buckets=REQUEST_SECONDS,
        )
        # Make all series at the start: a rate needs one before its first event.
        self._seconds = {outcome: seconds.labels(outcome) for outcome in OUTCOMES}

    def finished(self, path: str, status: int) -> None:
        self._requests.labels(path if path in self._paths else OTHER, str(status)).inc()

    def ended(self, outcome: str, seconds: float) -> None:
        self._seconds[outcome].observe(seconds)

    def in_flight(self) -> AbstractContextManager[None]:
        return self._in_flight.track_inprogress()


class ConnectionMetrics:
    """Connections to the port for requests."""

    def __init__(self) -> None:
        self.open = Gauge(
            "outrider_open_connections", "Connections to the port for requests.", multiprocess_mode="livesum"
        )
        self.refused = Counter("outrider_refused_connections", "Connections closed for --max-connections.")


class AnswerMetrics:
    """Finished answers, and whether they met the requested service levels."""

    def __init__(self) -> None:
        self._per_token = Histogram(
            "outrider_time_per_output_token_seconds",
            "Mean time between the tokens of an answer, one observation per whole answer.",
            buckets=TOKEN_SECONDS,
        )
        levels = Counter("outrider_service_level_requests", "Finished requests with a minimum speed.", ["met"])
        self._levels = {reached: levels.labels(str(reached).lower()) for reached in (True, False)}
        self.reached = {True: 0, False: 0}  # requests that met, and missed, their level
        self._goodput = Counter(
            "outrider_goodput_tokens", "Tokens of finished requests that met their service level, or had none."
        )

    def finished(self, tokens: int, per_token: float | None, speed: float | None, level: float) -> None:
        """Count an answer. per_token: seconds; speed, level: tokens per second; level: requested, 0 for none."""
        if per_token is not None:
            self._per_token.observe(per_token)
        reached = level <= 0 or (speed is not None and speed >= level)
        if level > 0:
            self._levels[reached].inc()
            self.reached[reached] += 1
        if reached:
            self._goodput.inc(tokens)


class KeyMetrics:
    """Metrics by the keys' names. The first `MOST_KEYS` keys that send a request have series of their own."""

    def __init__(self) -> None:
        self._requests = Counter("outrider_key_requests", "POST requests with the key, refused ones too.", ["key"])
        self._tokens = Counter(
            "outrider_key_tokens",
            "Tokens of the key's ended requests: of prompts, of prompts from the prefix cache, and of answers.",
            ["key", "kind"],
        )
        self._names: set[str] = set()

    def _label(self, name: str) -> str:
        if name not in self._names and len(self._names) < MOST_KEYS:
            self._names.add(name)
        return name if name in self._names else OTHER

    def count_request(self, name: str) -> None:
        label = self._label(name)
        self._requests.labels(label).inc()
        for kind in ("prompt", "cached", "completion"):  # a rate needs a series before its first event
            self._tokens.labels(label, kind)

    def count_tokens(self, request: RequestAdmission) -> None:
        """Count a request's tokens, once the engine is done with it."""
        if request.key_usage is None:
            return
        label, tokens = self._label(request.key_usage.key.name), request.tokens
        for kind, count in (("prompt", tokens.prompt), ("cached", tokens.cached), ("completion", tokens.completion)):
            self._tokens.labels(label, kind).inc(count)


def render() -> tuple[bytes, str]:
    """Return page and content type. Makes a new registry each time, as the multiprocess mode requires."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
