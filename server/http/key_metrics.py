"""Prometheus metrics of the keys: what each has asked and used."""

from __future__ import annotations

from prometheus_client import Counter

from .keys.admission import Admission

MOST_KEYS = 100
OTHER = "other"
"""Label of all keys beyond: a file may hold thousands, and each is four series."""


class KeyMetrics:
    """Metrics by the keys' names. The first `MOST_KEYS` keys that send a request have series of their own."""

    def __init__(self) -> None:
        self._requests = Counter("outrider_key_requests", "POST requests with the key, refused ones too.", ["key"])
        self._tokens = Counter(
            "outrider_key_tokens",
            "Tokens of the key's ended requests: of prompts, those among them from the prefix cache, and of answers.",
            ["key", "kind"],
        )
        self._names: set[str] = set()

    def _label(self, name: str) -> str:
        if name not in self._names and len(self._names) < MOST_KEYS:
            self._names.add(name)
        return name if name in self._names else OTHER

    def asked(self, name: str) -> None:
        """A request has come with the key of this name."""
        label = self._label(name)
        self._requests.labels(label).inc()
        for kind in ("prompt", "cached", "completion"):  # a rate needs a series before its first event
            self._tokens.labels(label, kind)

    def used(self, request: Admission) -> None:
        """The engine has nothing of the request any more."""
        if request.key_usage is None:
            return
        label, tokens = self._label(request.key_usage.key.name), request.tokens
        for kind, count in (("prompt", tokens.prompt), ("cached", tokens.cached), ("completion", tokens.completion)):
            self._tokens.labels(label, kind).inc(count)
