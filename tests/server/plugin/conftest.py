"""Prometheus counters that begin at zero in every test; the process's own registry takes each of them only once."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def value(registry: CollectorRegistry) -> Callable[..., float]:
    """value(name, **labels): what a counter stands at."""

    def read(name: str, **labels: object) -> float:
        return registry.get_sample_value(name, {key: str(label) for key, label in labels.items()}) or 0.0

    return read
