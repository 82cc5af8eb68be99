"""OpenTelemetry traces, for users who have its SDK installed and name a collector.

A span is made when its request is over, with the times that were noted meanwhile: nothing is done
for it while tokens flow.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_NANOSECONDS = 1_000_000_000
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class TracingError(RuntimeError):
    """Traces were asked for and cannot be made; the message says what to install."""


class Tracing:
    """Makes one span for each request, a child of the caller's if it sent a W3C traceparent."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("miniinfer")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_endpoint(cls, url: str) -> Tracing:
        """Return traces that are sent to a collector; raises `TracingError`."""
        try:
            from importlib import import_module

            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = import_module(_EXPORTER).OTLPSpanExporter(endpoint=url)
        except ImportError as error:
            raise TracingError(
                "--otlp-traces-endpoint needs the packages opentelemetry-sdk and "
                f"opentelemetry-exporter-otlp-proto-http ({error})"
            ) from error
        provider = TracerProvider(resource=Resource.create({"service.name": "miniinfer"}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def finish(self, request: web.Request, record: RequestRecord, route: str, status: int) -> None:
        """Make the span of a request that is over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        # Noted times are of the monotonic clock, those of spans since the epoch.
        offset = time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return int(moment * _NANOSECONDS) + offset

        span = self._tracer.start_span(
            f"{request.method} {route}",
            context=self._propagator.extract(dict(request.headers)),
            kind=SpanKind.SERVER,
            start_time=at(record.started),
            attributes=_attributes(request, record, route, status),
        )
        for name, moment in (("submitted", record.submitted), ("first_token", record.first_token)):
            if moment is not None:
                span.add_event(name, timestamp=at(moment))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error_code))
        span.end(time.time_ns())

    def close(self) -> None:
        """Send what is left; may wait for the collector."""
        self._provider.shutdown()


def _attributes(
    request: web.Request, record: RequestRecord, route: str, status: int
) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": request.method,
        "http.route": route,
        "http.response.status_code": status,
        "gen_ai.request.id": record.request_id,
    }
    if record.submitted is not None:
        attributes["gen_ai.usage.input_tokens"] = record.num_prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.num_output_tokens
        attributes["gen_ai.usage.cached_tokens"] = record.num_cached_tokens
    if record.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [record.finish_reason]
    seconds = record.seconds_to(record.first_token)
    if seconds is not None:
        attributes["gen_ai.latency.time_to_first_token"] = seconds
    return attributes
