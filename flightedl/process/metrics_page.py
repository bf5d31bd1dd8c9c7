"""Prometheus page of a server: metrics that are read on request, and metrics that are collected continuously.

Metrics read on request are gauges, or counters that the process already maintains. Collected metrics are in the
registry that is passed to the page (see ``ports.Instruments``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from flightedl.errors import FlightedlError
from flightedl.process.http_page import Answer, Asked

_log = logging.getLogger(__name__)


class Figure(NamedTuple):
    """A metric: either a single value, or one value for each value of a label."""

    #: Description for people.
    help_text: str
    #: The page omits a metric whose value is None (unknown).
    value: float | Mapping[str, float] | None
    #: Name of the label. Its values are the keys of ``value``.
    label: str = ""


#: Name -> metric. Metrics whose name ends in ``_total`` are counters.
Figures = Mapping[str, Figure]


class Metrics(Collector):
    """Metrics read by Prometheus.

    Args:
        labels: Labels of all metrics: the job, and the server's name.
        read: Returns the current metrics.
        gathered: Registry of collected metrics; None if there is none.
    """

    def __init__(
        self, labels: Mapping[str, str], read: Callable[[], Figures], gathered: CollectorRegistry | None = None
    ) -> None:
        self._labels = dict(labels)
        self._read = read
        self._gathered = gathered
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self, asked: Asked) -> Answer:
        encode, content_type = choose_encoder(asked.accept)
        return Answer(encode(self._registry), content_type)

    def describe(self) -> Iterator[Metric]:
        """Describe no metrics in advance: they are unknown until the page is requested."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        if self._gathered is not None:
            yield from self._gathered.collect()
        try:
            figures = self._read()
        except FlightedlError as error:
            _log.debug("no metrics at the moment: %s", error)
            return
        for name, (help_text, value, label) in figures.items():
            if value is not None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = kind(
                    f"flightedl_{name}", help_text, labels=[*self._labels, label] if label else [*self._labels]
                )
                values = value.items() if isinstance(value, Mapping) else [("", value)]
                for each, number in values:
                    family.add_metric([*self._labels.values(), *([each] if label else [])], number)
                yield family
