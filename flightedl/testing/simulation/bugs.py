"""All bugs that a run can be given, by name; see ``planted``."""

from __future__ import annotations

from flightedl.testing.simulation.planted import Planted
from flightedl.testing.simulation.planted_master import MASTER_BUGS
from flightedl.testing.simulation.planted_pserver import PSERVER_BUGS, ROW_BUGS
from flightedl.testing.simulation.planted_trainer import TRAINER_BUGS

#: Name -> what goes wrong in what the simulation models itself.
FLAWS: dict[str, str] = {
    "hashes are not compared": "a damaged shard file is loaded",
    "reported before it is written": "a pserver reports its file before it is in the store",
    "writes are not fenced": "a master's writes do not compare the lock",
}
#: Name -> a bug in the product.
PLANTED: dict[str, Planted] = MASTER_BUGS | PSERVER_BUGS | ROW_BUGS | TRAINER_BUGS
#: All that a run can be given: name -> what goes wrong.
BUGS: dict[str, str] = FLAWS | {name: bug.what for name, bug in PLANTED.items()}
