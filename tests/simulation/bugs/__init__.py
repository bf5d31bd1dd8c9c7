"""All bugs that can be planted in a run, by name. See ``tests.support.planting``."""

from __future__ import annotations

from tests.simulation.bugs.master import MASTER_BUGS
from tests.simulation.bugs.moves import MOVE_BUGS
from tests.simulation.bugs.pserver import PSERVER_BUGS, ROW_BUGS
from tests.simulation.bugs.standbys import STANDBY_BUGS
from tests.simulation.bugs.trainer import TRAINER_BUGS
from tests.support.planting import Planted

#: Name of a bug in the simulation's own models -> its description.
FLAWS: dict[str, str] = {
    "hashes are not compared": "a damaged shard file is loaded",
    "reported before it is written": "a pserver reports its file before it is in the store",
    "writes are not fenced": "a master's writes do not compare the lock",
}
#: Name -> bug in the product.
PLANTED: dict[str, Planted] = MASTER_BUGS | PSERVER_BUGS | ROW_BUGS | TRAINER_BUGS | MOVE_BUGS | STANDBY_BUGS
#: Name -> description, for every bug that can be planted.
BUGS: dict[str, str] = FLAWS | {name: bug.what for name, bug in PLANTED.items()}
