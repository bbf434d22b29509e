"""OpenTelemetry traces: SGLang's own, a trace per request with what each of its processes did for it.

A request that names a trace (`traceparent`) becomes part of it. Spans per decode step would cost time, and come only
with SGLANG_TRACE_LEVEL=3.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from outrider.server.errors import UserError

SERVICE = "outrider"


def check() -> None:
    """Raises UserError where the packages that send traces are missing."""
    for name in ("sdk", "exporter.otlp.proto.grpc", "exporter.otlp.proto.http"):
        try:
            found = find_spec(f"opentelemetry.{name}")
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise UserError(
                "--otlp-endpoint needs OpenTelemetry's exporters; install them with pip install 'outrider[traces]'"
            )


def arguments(endpoint: str) -> dict[str, Any]:
    """For SGLang's ServerArgs. The environment that its processes will read is set along with them.

    endpoint: HOST:PORT of a collector that takes gRPC, or the address of its route /v1/traces for HTTP.
    """
    os.environ.setdefault("SGLANG_TRACE_LEVEL", "1")
    protocol = "http/protobuf" if endpoint.rstrip("/").endswith("/v1/traces") else "grpc"
    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = protocol
    service = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
    return {"enable_trace": True, "otlp_traces_endpoint": endpoint, "otlp_service_name": service}


def begin(arguments: Any) -> None:
    """In this process, whose part SGLang's own HTTP server would otherwise begin; arguments: SGLang's ServerArgs."""
    from sglang.srt.observability.trace import process_tracing_init, trace_set_thread_info

    process_tracing_init(arguments.otlp_traces_endpoint, arguments.otlp_service_name, arguments.trace_modules)
    trace_set_thread_info("HTTP")
