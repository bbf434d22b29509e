"""Two engines at one address, with traces and logs."""

import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
from asking import MODEL, complete_all, tokens
from metrics_page import metric
from running import HTTP, ForkedServer, Server, wait_until
from small_target import SmallTarget

from outrider.server.machine import topology


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


pytestmark = pytest.mark.skipif(len(topology.here().cores) < 2, reason="needs two cores")
PROMPTS = [f"Tell me about the number {number}." for number in range(8)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget, collector: Collector
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("several") / "log"
    observing = ("--otlp-endpoint", collector.endpoint, "--log-requests", "content")
    flags = (*small_target.flags(), "--engines", "2", "--max-total-tokens", "4096", *observing)
    with ForkedServer(log, *flags) as started:
        yield started


def schedulers(server: Server) -> list[psutil.Process]:
    return [process for name, process in server.children().items() if name.startswith("scheduler")]


def test_an_answer_is_the_same_from_any_engine(server: Server) -> None:
    body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    together = complete_all(server, PROMPTS * 2, 16, speculate=True, **body)
    alone = complete_all(server, PROMPTS, 1, speculate=False, **body)
    assert [tokens(answer) for answer in together] == [tokens(answer) for answer in alone] * 2
    requests = [metric(server.url, "sglang:queue_time_seconds_count", dp_rank=str(engine)) for engine in range(2)]
    assert min(requests) >= len(PROMPTS) / 2


def test_counts_of_all_engines_add_up(server: Server) -> None:
    def counts() -> list[float]:
        names = ("outrider_accepted_length_sum", "sglang:realtime_tokens_total", "outrider_goodput_tokens_total")
        return [metric(server.url, names[0]), metric(server.url, names[1], mode="decode"), metric(server.url, names[2])]

    before = counts()
    complete_all(server, PROMPTS, 8, speculate=True, temperature=0, max_tokens=9, ignore_eos=True)
    decoded = 8 * len(PROMPTS)  # prefill draws the first token of each
    counted = lambda: [now - then for now, then in zip(counts(), before, strict=True)]  # noqa: E731
    wait_until(lambda: counted() == [decoded, decoded, 9 * len(PROMPTS)], 30)
    assert metric(server.url, "outrider_acceptance_collapsed") == 0


def test_a_request_becomes_part_of_the_trace_that_it_names(server: Server, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01", "X-Request-Id": "traced"}
    body = {"model": MODEL, "prompt": "Count to ten.", "max_tokens": 8, "ignore_eos": True}
    answer = HTTP.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).json()
    wait_until(lambda: {"prefill_forward", "decode_forward"} <= set(collector.of(trace_id)), 30)
    wait_until(lambda: any("rid" in attributes for attributes in collector.of(trace_id).values()), 30)
    (request,) = [span for span in collector.of(trace_id).values() if "rid" in span]
    assert request["rid"] == answer["id"]
    assert request["gen_ai.usage.completion_tokens"] == 8
    (line,) = [line for line in server.output().splitlines() if "request_id=traced" in line]
    assert answer["id"] in line
    assert "Count to ten." in line  # enabled by --log-requests content


def test_each_engine_stays_on_cores_of_its_own(server: Server) -> None:
    first, second = (set(process.cpu_affinity()) for process in schedulers(server))
    assert first
    assert second
    assert not first & second
    for process, cores in zip(schedulers(server), (first, second), strict=True):
        for thread in process.threads():
            assert set(psutil.Process(thread.id).cpu_affinity()) <= cores


def test_a_killed_engine_ends_the_server(server: Server) -> None:
    """The last test."""
    victim, *others = schedulers(server)
    victim.kill()
    wait_until(lambda: server.process.poll() is not None, 30)
    assert server.process.returncode == 1
    assert "Traceback" not in server.output()
    wait_until(lambda: not any(process.is_running() for process in others), 30)
