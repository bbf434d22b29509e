"""Prometheus counters that start at zero in every test."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def value(registry: CollectorRegistry) -> Callable[..., float]:
    """value(name, **labels): the value of a counter."""

    def read(name: str, **labels: object) -> float:
        return registry.get_sample_value(name, {key: str(label) for key, label in labels.items()}) or 0.0

    return read
