"""The Prometheus page of a server: figures that are read when the page is asked for, and kept nowhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from flightedl.errors import FlightedlError, UsageError

_log = logging.getLogger(__name__)

#: name -> (help, value); a value that is not known is left out.
Figures = Mapping[str, tuple[str, float | None]]


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

    Raises:
        UsageError: the port is taken.
    """

    def __init__(
        self, bind: str, port: int, labels: Mapping[str, str], read: Callable[[], Figures], tls: TlsFiles | None = None
    ) -> None:
        self._labels = dict(labels)
        self._read = read
        registry = CollectorRegistry()
        registry.register(self)
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

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What prometheus_client asks for."""
        try:
            figures = self._read()
        except FlightedlError as error:
            _log.debug("there are no figures at the moment: %s", error)
            return
        for name, (told, value) in figures.items():
            if value is not None:
                family = GaugeMetricFamily(f"flightedl_{name}", told, labels=list(self._labels))
                family.add_metric(list(self._labels.values()), value)
                yield family
