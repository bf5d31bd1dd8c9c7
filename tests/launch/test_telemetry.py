"""Traces of a job at a collector, to which each process exports its spans."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import flightedl as fe
from tests.support.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(180)]


class Collector(ThreadingHTTPServer):
    """Server that collects exported spans and logs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        #: (service, span name, trace id, span id, parent id).
        self.spans: list[tuple[str, str, bytes, bytes, bytes]] = []
        #: (service, text).
        self.logs: list[tuple[str, str]] = []

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _service(part.resource)
                for scope in part.scope_spans:
                    self.spans += [
                        (service, one.name, one.trace_id, one.span_id, one.parent_span_id) for one in scope.spans
                    ]
        else:
            for record in ExportLogsServiceRequest.FromString(body).resource_logs:
                for logs in record.scope_logs:
                    self.logs += [(_service(record.resource), one.body.string_value) for one in logs.log_records]


def _service(resource: object) -> str:
    return next(each.value.string_value for each in resource.attributes if each.key == "service.name")  # type: ignore[attr-defined]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.take(self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        # Spans that a killed process has not sent yet are lost.
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield server
        server.shutdown()
        thread.join()


def test_traces_span_processes_for_tasks_steps_checkpoints_and_recoveries(
    etcd: EtcdServer, job_name: str, collector: Collector, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"k": np.arange(60)}), tmp_path / "k.parquet", row_group_size=20)
    more = {"checkpoint": str(tmp_path / "checkpoints"), "telemetry": "otlp", "checkpoint_every_tasks": 1}
    with fe.local(job=job_name, etcd=etcd.address, **more) as cluster, cluster.connect() as job:
        data = job.dataset(tmp_path / "k.parquet", batch_size=10, epochs=2)
        model = job.parameters({"w": np.zeros(8, np.float32)}, optimizer=fe.SGD(lr=1.0))
        for number, _ in enumerate(data):
            model.step({"w": np.ones(8, np.float32)})
            if number == 8:
                with cluster.status() as status:
                    while not status.read(5.0).checkpoint:
                        time.sleep(0.02)
                cluster.kill("pserver")
    names = {(service, name) for service, name, *_ in collector.spans}
    assert {
        ("flightedl-trainer", "flightedl.master/tasks"),
        ("flightedl-master", "flightedl.master/tasks"),
        ("flightedl-trainer", "flightedl.step"),
        ("flightedl-pserver", "flightedl.pserver/step"),
        ("flightedl-master", "flightedl.checkpoint"),
        ("flightedl-pserver", "flightedl.checkpoint.copy"),
        ("flightedl-pserver", "flightedl.checkpoint.write"),
        ("flightedl-master", "flightedl.checkpoint.publish"),
        ("flightedl-pserver", "flightedl.recovery"),
    } <= names
    by_span = {span: (service, name, trace) for service, name, trace, span, _ in collector.spans}
    # A server's span is a child of its caller's span.
    for asked, inner in (("flightedl.transfer", "flightedl.pserver/step"), ("flightedl.master/tasks",) * 2):
        parents = [
            by_span[parent]
            for service, name, _, _, parent in collector.spans
            if name == inner and service != "flightedl-trainer" and parent in by_span
        ]
        assert parents
        assert {(service, name) for service, name, _ in parents} == {("flightedl-trainer", asked)}
    checkpoints = {trace for _, name, trace, *_ in collector.spans if name == "flightedl.checkpoint"}
    assert {trace for _, name, trace, *_ in collector.spans if name == "flightedl.checkpoint.write"} <= checkpoints
    assert any(service == "flightedl-master" and "checkpoint complete" in text for service, text in collector.logs)
