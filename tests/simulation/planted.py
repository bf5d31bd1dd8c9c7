"""Bugs that are planted in the product, to show that the simulation finds them.

Those in cores are the ones that the simulation of the cores finds, too. Those in drivers are found only here: no other
simulation executes drivers.
"""

from __future__ import annotations

from tests.simulation.bugs import PLANTED, drivers, moves, pserver, standbys
from tests.simulation.bugs.drivers import DRIVER_BUGS
from tests.support.planting import Planted

#: Those in models of drivers have no place in the product.
CORE_BUGS: dict[str, Planted] = {
    name: each for name, each in PLANTED.items() if not any(edit.place.startswith("tests.") for edit in each.edits)
}
BUGS: dict[str, Planted] = CORE_BUGS | DRIVER_BUGS
#: Bug -> the feature without which its scenarios never reach it; empty for none.
FEATURES: dict[str, str] = (
    dict.fromkeys(BUGS, "")
    | dict.fromkeys(pserver.ROW_BUGS | drivers.ROW_BUGS, "tables")
    | dict.fromkeys(moves.MOVE_BUGS | drivers.MOVE_BUGS, "moves")
    | dict.fromkeys(standbys.STANDBY_BUGS | drivers.STANDBY_BUGS, "standbys")
)
