"""Spans of HTTP requests and of choices: into memory, and over HTTP to a collector of our own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import MappingProxyType

import pytest

pytest.importorskip("opentelemetry.instrumentation.fastapi")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from foredraft.engine.observation import ChoiceTimes, EngineSnapshot
from foredraft.errors import ConfigError
from foredraft.server.metrics import Metrics
from foredraft.server.tracing import ChoiceTracer, trace_app, trace_with
from foredraft.statistics import EngineStats
from foredraft.stopping import FinishReason


def choice() -> ChoiceTimes:
    """A choice that has just ended, after three seconds."""
    now = time.perf_counter()
    return ChoiceTimes(
        arrival=now - 3,
        started=now - 2.5,
        first_token=now - 2,
        last_token=now,
        ended=now,
        num_prompt_tokens=30,
        num_generated_tokens=9,
        finish_reason=FinishReason.STOP,
    )


def app() -> FastAPI:
    made = FastAPI()

    @made.get("/stream")
    def stream() -> StreamingResponse:
        return StreamingResponse(iter(["a", "b", "c"]))

    @made.get("/health")
    def health() -> None:
        """Answer."""

    return made


def traced() -> tuple[FastAPI, InMemorySpanExporter, ChoiceTracer, Metrics]:
    exporter, provider, metrics, made = InMemorySpanExporter(), TracerProvider(), Metrics("tiny"), app()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return made, exporter, trace_with(made, provider, "tiny", metrics), metrics


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_choice_is_a_span_with_its_times() -> None:
    _, exporter, tracer, _ = traced()
    tracer.observe_end(choice())
    (span,) = exporter.get_finished_spans()
    assert span.name == "text_completion tiny"
    assert seconds(span) == pytest.approx(3, abs=1e-3)
    assert span.end_time == pytest.approx(time.time_ns(), abs=60e9)
    attributes = dict(span.attributes or {})
    assert attributes.pop("foredraft.time_in_queue") == pytest.approx(0.5)
    assert attributes.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(1)
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "foredraft",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert span.start_time is not None
    events = {event.name: (event.timestamp - span.start_time) / 1e9 for event in span.events}
    assert events == {"started": pytest.approx(0.5, abs=1e-3), "first token": pytest.approx(1, abs=1e-3)}


def test_a_choice_that_never_ran_has_a_span_too() -> None:
    _, exporter, tracer, _ = traced()
    tracer.observe_end(
        replace(choice(), started=None, first_token=None, last_token=None, finish_reason=FinishReason.ERROR)
    )
    (span,) = exporter.get_finished_spans()
    attributes = span.attributes or MappingProxyType({})
    assert not span.events
    assert attributes["error.type"] == "_OTHER"
    assert not {"foredraft.time_in_queue", "gen_ai.response.time_to_first_chunk"} & attributes.keys()


def test_all_is_passed_on_to_the_observer() -> None:
    _, _, tracer, metrics = traced()
    tracer.observe_step(EngineSnapshot(3, 2, 0.5, EngineStats(num_steps=7)))
    tracer.observe_gap(0.5, 2)
    tracer.observe_end(choice())
    lines = metrics.exposition()[0].decode().splitlines()
    assert 'foredraft:engine_steps_total{model_name="tiny"} 7.0' in lines
    assert 'foredraft:inter_token_latency_seconds_count{model_name="tiny"} 1.0' in lines
    assert 'foredraft:request_success_total{finished_reason="stop",model_name="tiny"} 1.0' in lines


def test_a_request_is_one_span_however_many_chunks_it_has() -> None:
    made, exporter, _, _ = traced()
    with TestClient(made) as client:
        assert client.get("/stream").text == "abc"
        assert client.get("/health").status_code == 200
    assert [span.name for span in exporter.get_finished_spans()] == ["GET /stream"]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A server that keeps what is posted to it: its address, and the path and body of each request."""
    posted: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()
        thread.join()


def test_spans_reach_a_collector(collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    address, posted = collector
    made = app()
    tracer = trace_app(made, f"{address}/v1/traces", "tiny", Metrics("tiny"))
    with TestClient(made) as client:
        client.get("/stream")
    tracer.observe_end(choice())
    tracer.close()
    assert {path for path, _ in posted} == {"/v1/traces"}
    spans = set()
    for _, body in posted:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            assert ("service.name", "foredraft") in {
                (one.key, one.value.string_value) for one in resource.resource.attributes
            }
            spans |= {span.name for scope in resource.scope_spans for span in scope.spans}
    assert spans == {"GET /stream", "text_completion tiny"}


def test_an_exit_does_not_wait_long_for_a_collector_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    tracer = trace_app(app(), f"http://127.0.0.1:{port}/v1/traces", "tiny", Metrics("tiny"))
    tracer.observe_end(choice())
    started = time.perf_counter()
    tracer.close()
    assert time.perf_counter() - started < 10
    assert "Failed to export" in caplog.text


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"traces_endpoint needs OpenTelemetry: pip install 'foredraft\[otel\]'"):
        trace_app(app(), "http://127.0.0.1:4318/v1/traces", "tiny", Metrics("tiny"))
