"""The Prometheus page of a server: figures that are read when the page is asked for, beside those that are gathered.

What is read is kept nowhere: a gauge, or the count that the process keeps anyway. What is gathered is in the registry
that the page is given (see ``ports.Instruments``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flightedl.errors import FlightedlError, UsageError

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


class TlsFiles(NamedTuple):
    """Paths of PEM files."""

    ca: str
    cert: str
    key: str


class MetricsPage(Collector):
    """Answers on a port of its own until it is closed.

    Args:
        bind: Numeric address.
        port: Where.
        labels: Of all figures: the job, and which server this is.
        read: The figures as they are now.
        tls: Files of a certificate, its key and the authorities: TLS, and only members may read; None: plain text.
        gathered: What is gathered; None: nothing is.

    Raises:
        UsageError: the port is taken.
    """

    def __init__(
        self,
        bind: str,
        port: int,
        labels: Mapping[str, str],
        read: Callable[[], Figures],
        tls: TlsFiles | None = None,
        gathered: CollectorRegistry | None = None,
    ) -> None:
        self._labels = dict(labels)
        self._read = read
        self._gathered = gathered
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        try:
            if tls is None:
                self._server, self._thread = start_http_server(port, bind, registry)
            else:
                self._server, self._thread = start_http_server(
                    port, bind, registry, tls.cert, tls.key, client_cafile=tls.ca, client_auth_required=True
                )
        except OSError as error:
            raise UsageError(f"the metrics page cannot be served on {bind} port {port}: {error}") from None

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> Iterator[Metric]:
        """Nothing: the figures are not known before the page is asked for."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks for."""
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
