"""Bugs that can be planted in the product, by name, to show that tests find them. See ``tests.support.planting``.

Those in cores are planted in ``flightedl.domain``, and those in ``drivers`` in everything around it.
"""

from __future__ import annotations

from tests.simulation.bugs import drivers
from tests.simulation.bugs.master import MASTER_BUGS
from tests.simulation.bugs.moves import MOVE_BUGS
from tests.simulation.bugs.pserver import PSERVER_BUGS, ROW_BUGS
from tests.simulation.bugs.standbys import STANDBY_BUGS
from tests.simulation.bugs.trainer import TRAINER_BUGS
from tests.support.planting import Planted

CORE_BUGS: dict[str, Planted] = MASTER_BUGS | PSERVER_BUGS | ROW_BUGS | TRAINER_BUGS | MOVE_BUGS | STANDBY_BUGS
BUGS: dict[str, Planted] = CORE_BUGS | drivers.DRIVER_BUGS
#: Bug -> the feature without which its scenarios never reach it; empty for none.
FEATURES: dict[str, str] = (
    dict.fromkeys(BUGS, "")
    | dict.fromkeys(ROW_BUGS | drivers.ROW_BUGS, "tables")
    | dict.fromkeys(MOVE_BUGS | drivers.MOVE_BUGS, "moves")
    | dict.fromkeys(STANDBY_BUGS | drivers.STANDBY_BUGS, "standbys")
    | dict.fromkeys(drivers.GROUP_BUGS, "groups")
)
