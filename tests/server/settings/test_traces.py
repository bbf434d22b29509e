"""Destinations of traces."""

import pytest
from refusals import refuses

from outrider.server.settings import traces

HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


@pytest.mark.parametrize(
    ("endpoint", "environment", "expected"),
    [
        ("collector:4317", {}, ("grpc", "collector:4317")),
        ("http://collector:4317", {}, ("grpc", "http://collector:4317")),
        ("collector:4318", {}, ("http/protobuf", "http://collector:4318/v1/traces")),
        ("https://host/otlp/v1/traces", {}, ("http/protobuf", "https://host/otlp/v1/traces")),
        ("http://host:9", HTTP, ("http/protobuf", "http://host:9/v1/traces")),
    ],
)
def test_the_protocol_is_that_of_the_address(
    endpoint: str, environment: dict[str, str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert traces.protocol_of(endpoint) == expected


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "find_spec", lambda name: None)
    refuses(r"traces\.txt", traces.check, "127.0.0.1:4317")


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:abc", "127.0.0.1:99999", "http://", ":4317"])
def test_invalid_addresses_are_refused(endpoint: str) -> None:
    refuses("HOST:4317", traces.check, endpoint)
