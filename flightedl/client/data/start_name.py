"""Name of a group's start. All ranks of one start use the same name, and different starts have different names.

The launcher sets the name (``FLIGHTEDL_START``). Otherwise rank 0 publishes its generation in the group's own store:
the store of PyTorch's initialized process group, the store of torchrun's agent, or JAX's coordinator. Without a store,
the name is empty, and ranks find each other only through the master.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flightedl.client.data.ranks import initialized_torch

#: Returns the name, or None if it is not published yet.
LookUp = Callable[[], str | None]

_AGENT_S = 30.0


def start_name(job: str, given: str, rank: int, generation: int) -> LookUp:
    """Return a function that looks up the name. On rank 0, publish the name first.

    Args:
        job: The job's name.
        given: Name set by the launcher; empty if there is none.
        rank: Rank of this process.
        generation: Generation of this process.
    """
    if given:
        return lambda: given
    store = _of_torch() or _of_jax() or _of_agent()
    if store is None:
        return lambda: ""
    key, name = f"flightedl/{job}/start", str(generation)
    if rank == 0:
        store.put(key, name)
        return lambda: name
    return lambda: store.get(key)


class _TorchStore:
    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


class _JaxStore:
    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> str | None:
        found = dict(self._client.key_value_dir_get(key.rpartition("/")[0]))
        return found.get(key)


def _of_torch() -> _TorchStore | None:
    if initialized_torch() is None:
        return None
    from torch.distributed import distributed_c10d

    return _TorchStore(distributed_c10d._get_default_store())  # noqa: SLF001 - the only way to the group's store


def _of_jax() -> _JaxStore | None:
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    client = getattr(state, "client", None)
    return None if client is None else _JaxStore(client)


def _of_agent() -> _TorchStore | None:
    """Return the store of torchrun's agent. It outlives a start, so keys are prefixed with the restart count."""
    names = os.environ  # noqa: TID251 - torchrun sets them
    if names.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "MASTER_PORT" not in names:
        return None
    from torch.distributed import PrefixStore, TCPStore

    address = names.get("MASTER_ADDR", "localhost"), int(names["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=_AGENT_S), wait_for_workers=False)
    return _TorchStore(PrefixStore(f"flightedl/{names.get('TORCHELASTIC_RESTART_COUNT', '0')}", store))
