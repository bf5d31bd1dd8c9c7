"""Name of a group's start. All ranks of one start use the same name, and different starts have different names.

The launcher sets the name (``FLIGHTEDL_START``). Otherwise rank 0 publishes its generation in the group's own store. If
the group has started its own master, the name includes the cluster id of that master's coordinator. Without a store,
the name is empty, and ranks find each other only through the master.
"""

from __future__ import annotations

from collections.abc import Callable

from flightedl.client.group_store import group_store
from flightedl.client.own_master import OwnMaster, key_of_master, key_of_start
from flightedl.errors import UsageError

#: Returns the name, or None if it is not published yet.
LookUp = Callable[[], str | None]


def start_name(job: str, given: str, rank: int, generation: int, own: OwnMaster | None = None) -> LookUp:
    """Return a function that looks up the name. On rank 0, publish the name first.

    ``given`` is the launcher's name for this start, if any, and ``own`` the group's own master.
    """
    if given:
        return lambda: given
    store = group_store()
    if store is None:
        return lambda: ""
    key, name = key_of_start(job), str(generation)
    if own is not None:
        key, name = f"{own.key}/start", f"{own.cluster}-{generation}"
    if rank == 0:
        store.put(key, name)
        return lambda: name

    def look_up() -> str | None:
        if own is None:
            if store.get(key_of_master(job, 1)) is not None:
                raise UsageError(
                    "FLIGHTEDL_ETCD is set for this rank, but not for rank 0: set it for all ranks, or for none"
                )
            return store.get(key)
        found = store.get(key)
        if found is None or found.startswith(own.cluster):
            return found
        # Either rank 0 has published the name of an earlier start, or this rank has found the master of one.
        own.require_current()
        return None

    return look_up
