"""The Prometheus page of a server: figures that are read when the page is asked for, beside those that are gathered.

What is read is kept nowhere: a gauge, or the count that the process keeps anyway. What is gathered is in the registry
that the page is given (see ``ports.Instruments``).
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

    #: For people.
    told: str
    #: A value that is not known is left out.
    value: float | Mapping[str, float] | None
    #: Name of the label whose values ``value`` has as keys.
    label: str = ""


#: Name -> figure; one that ends in ``_total`` only ever grows.
Figures = Mapping[str, Figure]


class Metrics(Collector):
    """Figures that Prometheus reads.

    Args:
        labels: Of all figures: the job, and which server this is.
        read: The figures as they are now.
        gathered: What is gathered; None: nothing is.
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
        """The page, in the format that the reader takes."""
        encode, content_type = choose_encoder(asked.accept)
        return Answer(encode(self._registry), content_type)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the figures are not known before the page is asked for."""
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
