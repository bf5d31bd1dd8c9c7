"""Spans and log records for OpenTelemetry, implemented with its SDK, which is an optional dependency.

OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``, ``OTEL_RESOURCE_ATTRIBUTES``
and others) configure the content and the destination of the export; flightedl's setting only enables it. The SDK
exports on its own thread, so a missing collector does not delay any step.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from flightedl.config import CommonSettings
from flightedl.errors import UsageError
from flightedl.ports import Clock
from flightedl.process import tracing
from flightedl.process.importing import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Result = TypeVar("Result")
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "opentelemetry.instrumentation.logging")


class OpenTelemetryTracer:
    """Implementation of ``process.tracing.Tracer``.

    Args:
        provider: The SDK's provider.
        clock: The process's clock.
    """

    def __init__(self, provider: TracerProvider, clock: Clock) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace, self._context = trace, context
        self._tracer = provider.get_tracer("flightedl")
        self._propagator = TraceContextTextMapPropagator()
        self._kinds = {
            "internal": trace.SpanKind.INTERNAL,
            "client": trace.SpanKind.CLIENT,
            "server": trace.SpanKind.SERVER,
        }
        #: Time at which the process's clock is zero, in nanoseconds since 1970.
        self._zero_ns = int((clock.wall_time() - clock.now()) * 1e9)
        self._lock = threading.Lock()
        #: Name -> (key, span) of each open lasting span.
        self._lasting: dict[str, tuple[int, Any]] = {}

    @contextlib.contextmanager
    def span(self, name: str, kind: str, attributes: dict[str, tracing.Attribute]) -> Iterator[object]:
        with self._tracer.start_as_current_span(
            name,
            kind=self._kinds[kind],
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as found:
            try:
                yield found
            except Exception as error:
                # The error's text is omitted, because it may name files.
                found.set_status(self._trace.StatusCode.ERROR)
                found.set_attribute("error.type", getattr(error, "code", type(error).__name__))
                raise

    def past(self, name: str, start_s: float, end_s: float) -> None:
        found = self._tracer.start_span(name, start_time=self._zero_ns + int(start_s * 1e9))
        found.end(self._zero_ns + int(end_s * 1e9))

    def carried(self) -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get(tracing.HEADER, "")

    @contextlib.contextmanager
    def continued(self, traceparent: str) -> Iterator[object]:
        found = self._propagator.extract({tracing.HEADER: traceparent}, context=self._context.Context())
        token = self._context.attach(found)
        try:
            yield None
        finally:
            self._context.detach(token)

    @contextlib.contextmanager
    def lasting(self, name: str, key: int) -> Iterator[object]:
        with self._lock:
            known, found = self._lasting.get(name, (None, None))
            if known != key:
                if found is not None:
                    found.end()
                found = self._tracer.start_span(name, context=self._context.Context())
                found.set_attribute(f"{name}.number", key)
                self._lasting[name] = key, found
        with self._trace.use_span(found):
            yield found

    def over(self, name: str, key: int) -> None:
        with self._lock:
            known, found = self._lasting.get(name, (None, None))
            if known == key and found is not None:
                del self._lasting[name]
                found.end()

    def bound(self, work: Callable[[], Result]) -> Callable[[], Result]:
        context = contextvars.copy_context()
        return lambda: context.run(work)


@contextlib.contextmanager
def telemetry(chosen: CommonSettings, role: str, clock: Clock) -> Iterator[None]:
    """If the settings enable it, send this process's spans and log records to a collector during the block.

    Raises:
        UsageError: a library is missing.
    """
    if not chosen.telemetry:
        yield
        return
    if any(_is_missing(name) for name in _NEEDED):
        raise UsageError(f"traces need OpenTelemetry: {install_command('opentelemetry')}")
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.logging.handler import LoggingHandler
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"flightedl-{role}", "flightedl.job": chosen.job})
    spans, logs = TracerProvider(resource=resource), LoggerProvider(resource=resource)
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
    handler = LoggingHandler(logger_provider=logs)
    ours = logging.getLogger("flightedl")
    ours.addHandler(handler)
    tracing.use(OpenTelemetryTracer(spans, clock))
    try:
        yield
    finally:
        tracing.use(None)
        ours.removeHandler(handler)
        spans.shutdown()
        logs.shutdown()


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True
