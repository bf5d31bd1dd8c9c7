"""Initial values of embedding rows: pure functions of (seed, table, id, element).

Any process can compute these values, so they need not be stored until they change. A counter-based generator (Salmon et
al. 2011) yields 64 bits for each element by applying the finalizer of splitmix64 to the row's stream and the element's
number. The values do not depend on the process or on the order in which rows are created.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flightedl.domain.model.settings import Setting, family, number
from flightedl.domain.splitmix64 import GOLDEN, mix


def stream_key(seed: int, salt: int) -> int:
    """Return a key for a table and a seed, which differs between tables and between seeds."""
    return mix(mix(seed + GOLDEN) ^ salt)


def element_bits(key: int, row: int, element: int) -> int:
    """Return 64 random bits for one element. ``row`` is the row's id as 64 bits."""
    return mix(mix(key ^ row) + (element + 1) * GOLDEN)


class Init(Setting):
    """Base of all initial values."""

    __slots__ = ()

    def first_values(self, key: int, row: int, dim: int) -> list[float]:
        """Return the ``dim`` elements of a row as float64. The table rounds them to its own dtype."""
        raise NotImplementedError


family(Init)


@dataclass(frozen=True, slots=True)
class Zeros(Init):
    """All elements are zero."""

    def first_values(self, key: int, row: int, dim: int) -> list[float]:  # noqa: ARG002 - the protocol's arguments
        return [0.0] * dim


@dataclass(frozen=True, slots=True)
class Uniform(Init):
    """Evenly distributed over [-``scale``, ``scale``)."""

    scale: float = number(above=0)

    def first_values(self, key: int, row: int, dim: int) -> list[float]:
        return [((element_bits(key, row, j) >> 40) * 2.0**-23 - 1.0) * self.scale for j in range(dim)]


@dataclass(frozen=True, slots=True)
class Normal(Init):
    """Normal distribution with this standard deviation around ``mean`` (Box & Muller 1958)."""

    std: float = number(above=0)
    mean: float = number(0.0)

    def first_values(self, key: int, row: int, dim: int) -> list[float]:
        values: list[float] = []
        for j in range(0, dim, 2):
            # The value is never zero, because zero has no logarithm.
            first = ((element_bits(key, row, j) >> 11) + 1) * 2.0**-53
            angle = (element_bits(key, row, j + 1) >> 11) * 2.0**-53 * (2 * math.pi)
            radius = math.sqrt(-2.0 * math.log(first)) * self.std
            values += [self.mean + radius * math.cos(angle), self.mean + radius * math.sin(angle)]
        return values[:dim]
