"""What a Prometheus page shows of figures that are read and of those that are gathered."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from flightedl.adapters.instruments import PrometheusInstruments
from flightedl.errors import NotReadyError
from flightedl.ports import Measure
from flightedl.process.metrics_page import Figure, Figures, MetricsPage

WAIT = Measure("wait_seconds", "Waits.", (0.1, 1.0))
CALLS = Measure("calls", "Calls.", (), "verb", ("push", "pull"))
LABELS = {"job": "demo"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


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
        contextlib.closing(MetricsPage("127.0.0.1", port, LABELS, read, None, registry)),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply,
    ):
        yield reply.read().decode()


def test_a_label_has_no_values_but_those_that_were_named(registry: CollectorRegistry) -> None:
    instruments = PrometheusInstruments(registry, LABELS, [CALLS])
    for verb in ("push", "push", "made-up-1", "made-up-2"):
        instruments.count(CALLS, 1.0, verb)
    with shown({}, registry) as page:
        assert 'flightedl_calls_total{job="demo",verb="push"} 2.0' in page
        assert 'flightedl_calls_total{job="demo",verb="pull"} 0.0' in page
        assert 'flightedl_calls_total{job="demo",verb="other"} 2.0' in page
        assert "made-up" not in page


def test_a_histogram_and_what_is_read_stand_on_one_page(registry: CollectorRegistry) -> None:
    instruments = PrometheusInstruments(registry, LABELS, [WAIT])
    instruments.observe(WAIT, 0.5)
    instruments.observe(CALLS, 1.0)  # Not among the measures of this process.
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


def test_what_is_gathered_is_shown_when_nothing_can_be_read(registry: CollectorRegistry) -> None:
    PrometheusInstruments(registry, LABELS, [WAIT]).observe(WAIT, 0.5)
    with shown(NotReadyError("no"), registry) as page:
        assert "flightedl_wait_seconds_count" in page
