"""Bugs that are planted in the product, to show that the simulation finds them.

Those in cores are the ones that the simulation of the cores finds, too. Those in drivers are found only here: no other
simulation executes drivers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack

from tests.simulation.bugs import PLANTED, moves, pserver, standbys
from tests.simulation.bugs.drivers import DRIVER_BUGS, MOVE_BUGS
from tests.support.planting import Edit, Planted, planted

#: Those in models of drivers have no place in the product.
CORE_BUGS: dict[str, Planted] = {
    name: each for name, each in PLANTED.items() if not any(edit.place.startswith("tests.") for edit in each.edits)
}
BUGS: dict[str, Planted] = CORE_BUGS | DRIVER_BUGS
#: Bug -> the feature without which its scenarios never reach it; empty for none.
FEATURES: dict[str, str] = (
    dict.fromkeys(BUGS, "")
    | dict.fromkeys(pserver.ROW_BUGS, "tables")
    | dict.fromkeys(moves.MOVE_BUGS | MOVE_BUGS, "moves")
    | dict.fromkeys(standbys.STANDBY_BUGS, "standbys")
)

#: Place of a function -> number of its calls in this process. See ``count``.
calls: Counter[str] = Counter()
_planted = ExitStack()


def plant(names: Iterable[str]) -> None:
    """Plant bugs in this process, for as long as it lives."""
    _planted.enter_context(planted([BUGS[name] for name in names]))


def count(places: Iterable[str]) -> None:
    """Count the calls of functions in this process, for as long as it lives."""
    edits = [Edit(place, "", f"import {__name__} as counting; counting.calls[{place!r}] += 1") for place in places]
    _planted.enter_context(planted([Planted("", tuple(edits))]))
