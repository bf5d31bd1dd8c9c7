"""Bugs that are planted in the product, to show that the simulation finds them.

Those in cores are the ones that the simulation of the cores finds, too. Those in drivers are found only here: no other
simulation executes drivers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from tests.simulation.cores.bugs import PLANTED
from tests.simulation.cores.planted import planted
from tests.simulation.driver_bugs import DRIVER_BUGS

BUGS = PLANTED | DRIVER_BUGS

_planted = ExitStack()


def plant(names: Iterable[str]) -> None:
    """Plant bugs in this process, for as long as it lives."""
    _planted.enter_context(planted([BUGS[name] for name in names]))
