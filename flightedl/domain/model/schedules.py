"""Learning-rate schedules, which are pure functions of a block's version.

``at(version)`` is the learning rate of the update from ``version`` to ``version + 1``; the first update is that from
version 0. Pservers evaluate the schedule for each block, so trainers and pservers need not exchange rates. ``updates``
counts versions: one per round in sync mode, one per accepted push in the other modes, including rounds and pushes
without a gradient for the block. So all blocks have the same rate, however often each of them has been updated.

Schedules can be combined: :class:`LinearWarmup` is followed by any other schedule, whose versions then start at zero.
Rates are computed in float64 and never rounded to the parameter's dtype.
"""

# ruff: noqa: RUF009 - number() makes a dataclass field, like field()

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from flightedl.domain.model.initial import Init
from flightedl.domain.model.settings import Limits, Setting, checked, family, number
from flightedl.errors import UsageError


class Schedule(Setting):
    """Base of the schedules."""

    __slots__ = ()

    def at(self, version: int) -> float:
        raise NotImplementedError


family(Schedule)


@dataclass(frozen=True, slots=True)
class Constant(Schedule, Init):
    """The same rate for all updates, or the same value for all elements of a table's initial rows."""

    value: float = number()

    def at(self, version: int) -> float:  # noqa: ARG002 - the protocol's argument
        return self.value

    def first_values(self, key: int, row: int, dim: int) -> list[float]:  # noqa: ARG002 - the protocol's arguments
        return [self.value] * dim

    def check_within(self, name: str, limits: Limits) -> None:
        checked(name, self.value, float, limits)


@dataclass(frozen=True, slots=True)
class StepDecay(Schedule):
    """``initial * factor ** (version // every)``: torch's StepLR."""

    initial: float = number(at_least=0)
    factor: float = number(0.1, at_least=0)
    every: int = number(1000, at_least=1)

    def at(self, version: int) -> float:
        return self.initial * math.pow(self.factor, version // self.every)


@dataclass(frozen=True, slots=True)
class Piecewise(Schedule):
    """``values[k]`` from ``boundaries[k-1]`` (inclusive) to ``boundaries[k]`` (exclusive)."""

    boundaries: tuple[int, ...] = number(at_least=1)
    values: tuple[float, ...] = number(at_least=0)

    def check(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            raise UsageError(
                f"Piecewise: values has {len(self.values)} rates, but {len(self.boundaries)} boundaries need "
                f"{len(self.boundaries) + 1}"
            )
        if any(later <= earlier for earlier, later in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise UsageError(f"Piecewise: boundaries {list(self.boundaries)} must rise")

    def at(self, version: int) -> float:
        return self.values[bisect_right(self.boundaries, version)]


@dataclass(frozen=True, slots=True)
class Cosine(Schedule):
    """Half a cosine wave from ``initial`` at version 0 to ``final`` at version ``updates``; constant from then on.

    ``final + (initial - final) * (1 + cos(pi * version / updates)) / 2``: Loshchilov & Hutter 2017, without restarts.
    """

    initial: float = number(at_least=0)
    updates: int = number(at_least=1)
    final: float = number(0.0, at_least=0)

    def at(self, version: int) -> float:
        if version >= self.updates:
            return self.final
        return self.final + (self.initial - self.final) * (1 + math.cos(math.pi * version / self.updates)) / 2


@dataclass(frozen=True, slots=True)
class Polynomial(Schedule):
    """``final + (initial - final) * (1 - version / updates) ** power``, then ``final``; linear if ``power`` is 1."""

    initial: float = number(at_least=0)
    updates: int = number(at_least=1)
    final: float = number(0.0, at_least=0)
    power: float = number(1.0, above=0)

    def at(self, version: int) -> float:
        if version >= self.updates:
            return self.final
        return self.final + (self.initial - self.final) * math.pow(1 - version / self.updates, self.power)


@dataclass(frozen=True, slots=True)
class LinearWarmup(Schedule):
    """A straight line from ``start`` at version 0 to the first rate of ``then`` at ``updates``; ``then`` follows.

    ``LinearWarmup(1000, Cosine(0.1, 50_000))`` lasts 51,000 updates. If ``start`` is 0, the first update changes only
    the optimizer's slots.
    """

    updates: int = number(at_least=1)
    then: float | Schedule = number(at_least=0)
    start: float = number(0.0, at_least=0)

    def at(self, version: int) -> float:
        if version >= self.updates:
            return rate_at(self.then, version - self.updates)
        return self.start + (rate_at(self.then, 0) - self.start) * version / self.updates


def rate_at(rate: float | Schedule, version: int) -> float:
    """Return the rate at ``version``, for a schedule or a constant."""
    return rate.at(version) if isinstance(rate, Schedule) else rate
