"""The Prometheus page of a server: figures that are read on request, beside figures that are gathered.

Figures that are read are gauges, or counts that the process keeps anyway. Gathered figures are in the registry that the
page gets (see ``ports.Instruments``).
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
    """One figure, or one for each value of a label."""

    #: Description for people.
    told: str
    #: An unknown value (None) is left out.
    value: float | Mapping[str, float] | None
    #: Name of the label whose values are the keys of ``value``.
    label: str = ""


#: Name -> figure; one that ends in ``_total`` only ever grows.
Figures = Mapping[str, Figure]


class Metrics(Collector):
    """Figures that Prometheus reads.

    Args:
        labels: Labels of all figures: the job, and the server's name.
        read: Returns the present figures.
        gathered: Registry of gathered figures, or None.
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
        """Return the page in the format that the reader accepts."""
        encode, content_type = choose_encoder(asked.accept)
        return Answer(encode(self._registry), content_type)

    def describe(self) -> Iterator[Metric]:
        """Describe no figures: they are not known before the page is requested."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the figures for prometheus_client."""
        if self._gathered is not None:
            yield from self._gathered.collect()
        try:
            figures = self._read()
        except FlightedlError as error:
            _log.debug("there are no figures at the moment: %s", error)
            return
        for name, (told, value, label) in figures.items():
            if value is not None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = kind(f"flightedl_{name}", told, labels=[*self._labels, label] if label else [*self._labels])
                values = value.items() if isinstance(value, Mapping) else [("", value)]
                for each, number in values:
                    family.add_metric([*self._labels.values(), *([each] if label else [])], number)
                yield family
