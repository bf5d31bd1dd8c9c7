"""Counters and histograms for Prometheus, implemented with the Prometheus client library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from flightedl.ports import Measure

_PREFIX = "flightedl_"
_OTHER = "other"


class PrometheusInstruments:
    """Implementation of ``ports.Instruments``.

    Args:
        registry: Registry of the page that shows the metrics.
        labels: Labels of all metrics: the job, and the process's name.
        measures: All measures to record. Others are ignored.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str], measures: Iterable[Measure]) -> None:
        self._counters: dict[tuple[str, str], Counter] = {}
        self._histograms: dict[tuple[str, str], Histogram] = {}
        for measure in measures:
            name, names = _PREFIX + measure.name, [*labels, measure.label] if measure.label else [*labels]
            found: Counter | Histogram = (
                Histogram(name, measure.help_text, names, buckets=measure.buckets, registry=registry)
                if measure.buckets
                else Counter(name, measure.help_text, names, registry=registry)
            )
            for label in (*measure.labels, _OTHER) if measure.label else ("",):
                child = found.labels(*labels.values(), *([label] if measure.label else []))
                if isinstance(child, Histogram):
                    self._histograms[measure.name, label] = child
                else:
                    self._counters[measure.name, label] = child

    def count(self, measure: Measure, amount: float = 1.0, label: str = "") -> None:
        counters = self._counters
        found = counters.get((measure.name, label)) or counters.get((measure.name, _OTHER))
        if found is not None:
            found.inc(amount)

    def observe(self, measure: Measure, value: float, label: str = "") -> None:
        histograms = self._histograms
        found = histograms.get((measure.name, label)) or histograms.get((measure.name, _OTHER))
        if found is not None:
            found.observe(value)
