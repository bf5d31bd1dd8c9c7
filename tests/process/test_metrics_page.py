"""A Prometheus page with collected metrics, and with gauges read on request."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from flightedl.adapters.instruments import PrometheusInstruments
from flightedl.errors import NotReadyError
from flightedl.ports import Measure
from flightedl.process import http_page
from flightedl.process.http_page import HttpPage, patient_page
from flightedl.process.metrics_page import Figure, Figures, Metrics
from tests.support.contracts.coordinator import eventually
from tests.support.processes import free_port

WAIT = Measure("wait_seconds", "Waits.", (0.1, 1.0))
CALLS = Measure("calls", "Calls.", (), "verb", ("push", "pull"))
LABELS = {"job": "demo"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@contextlib.contextmanager
def shown(figures: Figures | Exception, registry: CollectorRegistry) -> Iterator[str]:
    def read() -> Figures:
        if isinstance(figures, Exception):
            raise figures
        return figures

    port = free_port()
    with (
        contextlib.closing(HttpPage("page", "127.0.0.1", port, Metrics(LABELS, read, registry).page)),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply,
    ):
        yield reply.read().decode()


def test_a_label_has_only_declared_values(registry: CollectorRegistry) -> None:
    instruments = PrometheusInstruments(registry, LABELS, [CALLS])
    for verb in ("push", "push", "made-up-1", "made-up-2"):
        instruments.count(CALLS, 1.0, verb)
    with shown({}, registry) as page:
        assert 'flightedl_calls_total{job="demo",verb="push"} 2.0' in page
        assert 'flightedl_calls_total{job="demo",verb="pull"} 0.0' in page
        assert 'flightedl_calls_total{job="demo",verb="other"} 2.0' in page
        assert "made-up" not in page


def test_histograms_and_gauges_share_a_page(registry: CollectorRegistry) -> None:
    instruments = PrometheusInstruments(registry, LABELS, [WAIT])
    instruments.observe(WAIT, 0.5)
    instruments.observe(CALLS, 1.0)  # This process does not declare the measure.
    figures = {
        "epoch": Figure("Epoch.", 3),
        "unknown": Figure("Not known.", None),
        "rows_total": Figure("Rows.", {"taken": 5}, "outcome"),
    }
    with shown(figures, registry) as page:
        assert 'flightedl_wait_seconds_bucket{job="demo",le="1.0"} 1.0' in page
        assert 'flightedl_epoch{job="demo"} 3.0' in page
        assert 'flightedl_rows_total{job="demo",outcome="taken"} 5.0' in page
        assert "flightedl_unknown" not in page
        assert "# TYPE flightedl_rows_total counter" in page
        assert "process_resident_memory_bytes" in page


def test_collected_metrics_are_shown_when_gauges_cannot_be_read(registry: CollectorRegistry) -> None:
    PrometheusInstruments(registry, LABELS, [WAIT]).observe(WAIT, 0.5)
    with shown(NotReadyError("no"), registry) as page:
        assert "flightedl_wait_seconds_count" in page


def status_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return int(error.code)


def test_a_page_on_loopback_does_not_answer_to_other_names(registry: CollectorRegistry) -> None:
    port = free_port()
    metrics = Metrics(LABELS, dict, registry)
    with contextlib.closing(HttpPage("page", "127.0.0.1", port, metrics.page)):
        url = f"http://127.0.0.1:{port}/metrics"
        for host, status in (("localhost", 200), ("127.0.0.1:1", 200), ("evil.example", 403)):
            request = urllib.request.Request(url, headers={"Host": host})
            assert status_of(request) == status


def test_an_occupied_port_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_page, "_AGAIN_S", 0.01)
    metrics = Metrics(LABELS, dict)
    first = HttpPage("page", "127.0.0.1", 0, metrics.page)
    opened: list[HttpPage] = []

    def open_again() -> HttpPage:
        opened.append(HttpPage("page", "127.0.0.1", first.port, metrics.page))
        return opened[0]

    with patient_page(open_again):
        assert not opened
        first.close()
        eventually(lambda: opened)
        with urllib.request.urlopen(f"http://127.0.0.1:{first.port}/metrics", timeout=5) as reply:
            assert reply.status == 200
