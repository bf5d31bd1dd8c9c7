"""Instruments that keep all measurements, so that tests can inspect them."""

from __future__ import annotations

from collections import Counter, defaultdict

from flightedl.ports import Measure


class MemoryInstruments:
    """See ``ports.Instruments``. Not thread-safe."""

    def __init__(self) -> None:
        #: (name, label) -> sum, or list of observed values.
        self.counts: Counter[tuple[str, str]] = Counter()
        self.values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def count(self, measure: Measure, amount: float = 1.0, label: str = "") -> None:
        self.counts[measure.name, self._known(measure, label)] += amount  # type: ignore[assignment]

    def observe(self, measure: Measure, value: float, label: str = "") -> None:
        self.values[measure.name, self._known(measure, label)].append(value)

    @staticmethod
    def _known(measure: Measure, label: str) -> str:
        return label if label in measure.labels or not measure.label else "other"
