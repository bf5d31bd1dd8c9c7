"""Spans of steps and calls in one process, read with OpenTelemetry's own exporter; none without tracing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from flightedl.adapters import telemetry as adapter
from flightedl.adapters.clock import SystemClock
from flightedl.adapters.telemetry import OpenTelemetryTracer, telemetry
from flightedl.config import CommonSettings
from flightedl.domain.consistency.modes import Sync
from flightedl.errors import MessageError, UsageError
from flightedl.process import tracing
from flightedl.rpc import Connection, FlightServer, ServerIdentity
from flightedl.rpc.call import Call
from flightedl.rpc.routes import Routes

from ..client.pserver_bench import Cluster

Spans = InMemorySpanExporter


@pytest.fixture
def spans() -> Iterator[Spans]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(OpenTelemetryTracer(provider, SystemClock()))
    yield exporter
    tracing.use(None)
    provider.shutdown()


def named(spans: Spans, name: str) -> list[ReadableSpan]:
    return [each for each in spans.get_finished_spans() if each.name == name]


def is_inside(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    return inner.parent is not None and inner.parent.span_id == outer.context.span_id


def phases_of(spans: Spans, transfer: ReadableSpan) -> list[str]:
    """Return the phases of a transfer in order."""
    inside = [one.name.removeprefix("flightedl.") for one in spans.get_finished_spans() if is_inside(one, transfer)]
    return [name for name in inside if name in {"push", "wait", "pull"}]


def test_a_step_is_one_trace_on_both_sides_of_the_wire(spans: Spans) -> None:
    with Cluster({"a": (4,), "b": (4,)}, Sync(), pservers=2) as cluster:
        trainer = cluster.trainer()
        spans.clear()
        for batch in range(2):
            trainer.begin(batch)
            trainer.parameters.step(dict.fromkeys("ab", np.ones(4, np.float32)))
        trainer.parameters.pull(min_version=2)
    steps = named(spans, "flightedl.step")
    served = named(spans, "flightedl.pserver/step")
    assert len(steps) == 2
    assert len(served) == 4
    for each in served:
        assert each.kind is SpanKind.SERVER
        assert each.attributes is not None
        assert each.attributes["rpc.system"] == "grpc"
        assert each.attributes["rpc.service"] == "flightedl.pserver"
        assert each.attributes["rpc.method"] == "step"
        (transfer,) = [one for one in named(spans, "flightedl.transfer") if is_inside(each, one)]
        # Both steps use the same stream, and each has its own trace.
        assert sum(is_inside(transfer, step) for step in steps) == 1
        assert phases_of(spans, transfer) == ["push"], "values arrived with the answers"
    pulls = [one for one in named(spans, "flightedl.transfer") if one.parent is None]
    assert [phases_of(spans, each) for each in pulls] == [["wait", "pull"]] * 2
    assert len({each.context.trace_id for each in served}) == 2


def test_a_call_has_its_span_in_a_header_and_the_span_has_its_outcome(spans: Spans) -> None:
    def refuse(_body: bytes, _call: Call) -> bytes:
        raise MessageError("no: /a/path")

    identity = ServerIdentity("bench", "pserver", 0, 1)
    routes = Routes(actions={"refuse": refuse, "stacks": lambda *_: b""})
    server = FlightServer(routes, identity, clock=SystemClock())
    server.start_serving(identity)
    with Connection(server.address, expected=identity) as connection:
        with pytest.raises(MessageError):
            connection.action("refuse", b"", timeout_s=5)
        connection.action("stacks", b"", timeout_s=5)
    server.stop(0.5)
    asked, served = sorted(spans.get_finished_spans(), key=lambda each: each.kind.value, reverse=True)
    assert (asked.name, asked.kind, served.kind) == ("flightedl.pserver/refuse", SpanKind.CLIENT, SpanKind.SERVER)
    assert is_inside(served, asked)
    assert asked.attributes is not None
    assert asked.attributes["server.port"] == server.port
    assert asked.attributes["error.type"] == "message"
    assert (asked.status.status_code, asked.status.description) == (StatusCode.ERROR, None)


def test_a_long_span_contains_everything_until_it_ends(spans: Spans) -> None:
    for number in (1, 1, 2):
        with tracing.lasting("checkpoint", number), tracing.span("checkpoint.publish"):
            pass
    assert [each.name for each in spans.get_finished_spans()].count("flightedl.checkpoint") == 1
    tracing.over("checkpoint", 1)
    tracing.over("checkpoint", 2)
    lasting = named(spans, "flightedl.checkpoint")
    assert [each.attributes for each in lasting] == [{"flightedl.checkpoint.number": n} for n in (1, 2)]
    assert [is_inside(each, lasting[0]) for each in named(spans, "flightedl.checkpoint.publish")] == [True, True, False]


def test_a_malformed_traceparent_is_ignored(spans: Spans) -> None:
    with tracing.serves("master", "tasks", "00-zz-1-nonsense"):
        assert tracing.carried().startswith("00-")
    (found,) = spans.get_finished_spans()
    assert found.parent is None


def test_no_header_is_sent_without_tracing() -> None:
    assert tracing.tracer is None
    with tracing.span("step"), tracing.asks("master", "tasks", "h:1"), tracing.serves("master", "tasks", ""):
        assert tracing.carried() == ""


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_is_missing", lambda _name: True)
    with (
        pytest.raises(UsageError, match=r"pip install 'opentelemetry-sdk"),
        telemetry(CommonSettings(telemetry="otlp"), "trainer", SystemClock()),
    ):
        raise AssertionError
    with pytest.raises(UsageError, match="telemetry is 'x', but must be otlp"):
        CommonSettings(telemetry="x")
