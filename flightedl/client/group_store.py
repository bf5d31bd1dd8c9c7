"""The store of small values that a group's launcher or framework shares between the ranks."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

from flightedl.client.data.ranks import initialized_torch
from flightedl.errors import UnavailableError

_AGENT_S = 30.0


def group_store() -> _TorchStore | _JaxStore | None:
    """Return the store of PyTorch's initialized process group, of JAX, or of torchrun's agent; None if there is none.

    Raises:
        UnavailableError: torchrun's store cannot be reached.
    """
    if initialized_torch() is not None:
        from torch.distributed import distributed_c10d

        return _TorchStore(distributed_c10d._get_default_store())  # noqa: SLF001 - the only way to the group's store
    # It outlives a start, so keys are prefixed with the restart count.
    return _of_jax() or agent_store(f"flightedl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")  # noqa: TID251


class _TorchStore:
    def __init__(self, store: Any) -> None:
        self._store = store
        inner = store
        while hasattr(inner, "underlying_store"):
            inner = inner.underlying_store
        self.host = os.environ.get("MASTER_ADDR") or str(getattr(inner, "host", ""))  # noqa: TID251 - launchers set it

    def put(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


class _JaxStore:
    def __init__(self, client: Any, host: str) -> None:
        self._client = client
        self.host = host

    def put(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str) -> str | None:
        found = dict(self._client.key_value_dir_get(key.rpartition("/")[0]))
        return found.get(key)


def _of_jax() -> _JaxStore | None:
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    client = getattr(state, "client", None)
    host = str(getattr(state, "coordinator_address", None) or "").rpartition(":")[0]
    return None if client is None else _JaxStore(client, host)


def agent_store(prefix: str) -> _TorchStore | None:
    """Return the store of torchrun's agent, which outlives a start; None if torchrun does not offer it.

    Raises:
        UnavailableError: it cannot be reached.
    """
    names = os.environ  # noqa: TID251 - torchrun sets them
    if names.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "MASTER_PORT" not in names:
        return None
    host, port = names.get("MASTER_ADDR", "localhost"), int(names["MASTER_PORT"])
    try:
        # PyTorch would repeat its attempts until the timeout.
        socket.create_connection((host, port), _AGENT_S).close()
    except OSError as error:
        place = f"torchrun's store at {host} port {port} (MASTER_ADDR, MASTER_PORT)"
        raise UnavailableError(f"{place} cannot be reached from this machine: {error.strerror or error}") from None
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_AGENT_S), wait_for_workers=False)
    return _TorchStore(PrefixStore(prefix, store))


GroupStore = _TorchStore | _JaxStore
