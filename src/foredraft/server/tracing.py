"""OpenTelemetry traces: a span for each HTTP request, and one for each choice that the engine has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from foredraft.engine.observation import ChoiceTimes, EngineSnapshot, Observer
from foredraft.errors import ConfigError
from foredraft.stopping import FinishReason

if TYPE_CHECKING:  # an optional extra
    from fastapi import FastAPI
    from opentelemetry.sdk.trace import TracerProvider

_NOT_TRACED = "/health$,/metrics$"  # asked for every few seconds
_EXPORT_SECONDS = 2.0  # an exit waits no longer for a collector that does not answer


class ChoiceTracer:
    """Passes all that it observes on to `observer`, and makes a span of each choice that has ended.

    Attributes are those of OpenTelemetry's conventions for generative AI; times of a part are in seconds, and those of
    an event are its own. What did not happen has no attribute.
    """

    def __init__(self, provider: TracerProvider, model_name: str, observer: Observer) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("foredraft")
        self._model_name = model_name
        self._observer = observer

    def observe_step(self, snapshot: EngineSnapshot) -> None:
        """Pass it on."""
        self._observer.observe_step(snapshot)

    def observe_gap(self, seconds: float, num_tokens: int) -> None:
        """Pass it on."""
        self._observer.observe_gap(seconds, num_tokens)

    def observe_end(self, times: ChoiceTimes) -> None:
        """Pass it on, and make the span; another thread exports it."""
        self._observer.observe_end(times)
        epoch = time.time() - time.perf_counter()
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "foredraft",
            "gen_ai.request.model": self._model_name,
            "gen_ai.usage.input_tokens": times.num_prompt_tokens,
            "gen_ai.usage.output_tokens": times.num_generated_tokens,
            "gen_ai.response.finish_reasons": (str(times.finish_reason),),
        }
        if times.finish_reason is FinishReason.ERROR:
            attributes["error.type"] = "_OTHER"
        if times.started is not None:
            attributes["foredraft.time_in_queue"] = times.started - times.arrival
        if times.first_token is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = times.first_token - times.arrival
        name = f"text_completion {self._model_name}"
        span = self._tracer.start_span(name, start_time=_nanoseconds(epoch + times.arrival), attributes=attributes)
        for event, when in (("started", times.started), ("first token", times.first_token)):
            if when is not None:
                span.add_event(event, timestamp=_nanoseconds(epoch + when))
        span.end(_nanoseconds(epoch + times.ended))

    def close(self) -> None:
        """Export what is left, and end the exporter's thread. Takes seconds if the collector does not answer."""
        self._provider.shutdown()


def trace_app(app: FastAPI, endpoint: str, model_name: str, observer: Observer) -> ChoiceTracer:
    """Trace the requests of `app`, and give the engine an observer that traces choices, in front of `observer`.

    endpoint: where spans are sent by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces. Call it before the app
    serves. Raises ConfigError if OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("traces_endpoint needs OpenTelemetry: pip install 'foredraft[otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "foredraft"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)))
    return trace_with(app, provider, model_name, observer)


def trace_with(app: FastAPI, provider: TracerProvider, model_name: str, observer: Observer) -> ChoiceTracer:
    """As `trace_app`, for a provider of your own. The process's global provider is left as it is."""
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

    # A span for each message sent would be one for each token of a stream.
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls=_NOT_TRACED, exclude_spans=["receive", "send"]
    )
    return ChoiceTracer(provider, model_name, observer)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
