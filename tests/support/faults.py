"""Faults that a test plans at named points in the code.

When execution passes a point, the in-memory twin or test double at that point reports the point's name to the plan,
which counts and records it. A test can thus run once to find the points, and then fail at each of them.
"""

from __future__ import annotations

import threading
from collections import Counter


class InjectedFault(Exception):  # noqa: N818 - it represents a crash, not an error of flightedl
    """The simulated death of a process at a point."""


class FaultPlan:
    """A plan that determines which points fail, and when. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._planned: dict[tuple[str, int], Exception] = {}
        self._lasting: dict[str, Exception] = {}
        self._trace: list[str] = []
        self._fail_at_step: dict[int, Exception] = {}

    def fail_at(self, point: str, n: int = 1, error: Exception | None = None) -> None:
        """Raise ``error`` (default: an InjectedFault) at the n-th pass of ``point`` from now on; 1 is the next pass."""
        with self._lock:
            nth = self._counts[point] + n
            self._planned[point, nth] = error or InjectedFault(f"planned at {point}, pass {nth}")

    def fail_from(self, point: str, error: Exception) -> None:
        """Raise at every pass of ``point`` until ``heal``."""
        with self._lock:
            self._lasting[point] = error

    def heal(self, point: str) -> None:
        """Undo ``fail_from``."""
        with self._lock:
            del self._lasting[point]

    def fail_at_step(self, n: int, error: Exception | None = None) -> None:
        """Raise at the n-th pass of any point, counted since the plan was created; 1 is the first pass."""
        with self._lock:
            self._fail_at_step[n] = error or InjectedFault(f"planned at step {n}")

    def reached(self, point: str) -> None:
        """Report that execution passes ``point``. Raises the error planned for this pass, if any."""
        with self._lock:
            self._counts[point] += 1
            self._trace.append(point)
            error = self._planned.pop((point, self._counts[point]), None) or self._lasting.get(point)
            error = self._fail_at_step.pop(len(self._trace), None) or error
        if error is not None:
            raise error

    def count(self, point: str) -> int:
        with self._lock:
            return self._counts[point]

    @property
    def trace(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._trace)
