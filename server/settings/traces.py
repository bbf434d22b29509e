"""SGLang's OpenTelemetry traces: one per request, of all processes.

A request that names a trace (`traceparent`) becomes part of it. Spans per decode step would cost time, and come only
with SGLANG_TRACE_LEVEL=3.
"""

import os
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from ..errors import UserError

SERVICE = "outrider"
ENVIRONMENT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own names for a collector's address."""
HTTP_PORT, HTTP_ROUTE = 4318, "/v1/traces"


def check(endpoint: str) -> None:
    """Raise UserError for a malformed address, or if the packages that send traces are missing."""
    protocol_of(endpoint)
    for name in ("sdk", "exporter.otlp.proto.grpc", "exporter.otlp.proto.http"):
        try:
            spec = find_spec(f"opentelemetry.{name}")
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            raise UserError(
                f"--otlp-endpoint (or {ENVIRONMENT[-1]}) needs OpenTelemetry's exporters; "
                "pip install --no-deps -r deploy/requirements/traces.txt installs them"
            )


def protocol_of(endpoint: str) -> tuple[str, str]:
    """Return OTLP's protocol to a collector, and its address in that protocol; raises UserError.

    HTTP where the address has HTTP's port or route, or OpenTelemetry's environment says so; else gRPC.
    """
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    address = urlsplit(endpoint if "//" in endpoint else f"http://{endpoint}")
    try:
        port, host = address.port, address.hostname
    except ValueError:  # no number, or too large a one
        host = None
    if host is None:
        raise UserError(f"--otlp-endpoint is HOST:4317 for gRPC or HOST:4318 for HTTP, not {endpoint!r}")
    if not (protocol.startswith("http") or port == HTTP_PORT or address.path.rstrip("/").endswith(HTTP_ROUTE)):
        return "grpc", endpoint
    path = address.path.rstrip("/")
    return "http/protobuf", address._replace(path=path if path.endswith(HTTP_ROUTE) else path + HTTP_ROUTE).geturl()


def arguments(endpoint: str) -> dict[str, Any]:
    """Return arguments for SGLang's ServerArgs. Also sets the environment that its processes will read.

    endpoint: of a collector; see `protocol_of`.
    """
    os.environ.setdefault("SGLANG_TRACE_LEVEL", "1")
    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"], endpoint = protocol_of(endpoint)
    service = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
    return {"enable_trace": True, "otlp_traces_endpoint": endpoint, "otlp_service_name": service}


def begin(arguments: Any) -> None:
    """Start traces in this process, as SGLang's own HTTP server would; arguments: SGLang's ServerArgs."""
    from sglang.srt.observability.trace import process_tracing_init, trace_set_thread_info

    process_tracing_init(arguments.otlp_traces_endpoint, arguments.otlp_service_name, arguments.trace_modules)
    trace_set_thread_info("HTTP")
