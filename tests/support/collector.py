"""A minimal collector of OpenTelemetry traces: takes OTLP over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Collector:
    """Listens on this machine; `spans` are the received ones."""

    def __init__(self) -> None:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = service.ExportTraceServiceRequest()
                sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                spans.extend(span for part in sent.resource_spans for scope in part.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of(self, trace_id: str) -> dict[str, dict[str, Any]]:
        """Attributes of a trace's spans, by name; trace_id: in hexadecimal."""
        return {
            span.name: {item.key: item.value.string_value or item.value.int_value for item in span.attributes}
            for span in self.spans
            if span.trace_id.hex() == trace_id
        }

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
