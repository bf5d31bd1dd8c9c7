"""Machine of a simulated process. Replaces ``flightedl.process.machine``, and has the same functions.

``install`` also replaces the factory of coordinators, and the few parts of other modules that share state between the
processes of one real process.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable

from tests.simulation.flight import network, numeric
from tests.simulation.scheduler import running, this_process

_CORES = 4


def host_name() -> str:
    """Return the name of the simulated machine."""
    return this_process().host


def process_id() -> int:
    """Return the number of the simulated process."""
    scheduler = running()
    return 1 if scheduler is None or scheduler.current is None else this_process().pid


def tune_server() -> None:
    """Nothing to tune."""


def tune_trainer() -> None:
    """Nothing to tune."""


def avoid_preemption() -> bool:
    """Nothing to tune."""
    return True


def on_termination(end: Callable[[str], None]) -> None:
    """Keep what the simulation calls in place of a signal."""
    this_process().on_termination = end


def set_garbage_aside() -> None:
    """Garbage collection is off while a seed runs."""


def release_startup_memory() -> int:
    """Memory belongs to the real process."""
    return 0


def give_back(kept_bytes: int) -> bool:
    """Memory belongs to the real process."""
    return False


def require_bindable(host: str, port: int) -> None:
    """Raise UsageError unless a server can listen on this numeric address."""
    from flightedl.config import require_numeric
    from flightedl.errors import UsageError

    require_numeric(host)
    if port and network().server_at((host, port)) is not None:
        raise UsageError(f"cannot listen on {host} port {port} (in use): choose another port")


def refuses(address: str, timeout_s: float) -> bool:
    """True if no live process listens there, and the way there is open."""
    host, _, port = address.rpartition(":")
    return network().server_at((numeric(host), int(port))) is None


def hold_name(name: str) -> contextlib.AbstractContextManager[object]:
    """Every name is free: machines have enough processors."""
    return contextlib.nullcontext()


def abort_connections(local_port: int, remote_port: int | None = None) -> int:
    """Break the connections that were accepted on a port."""
    return network().sever(lambda call: call.address[1] == local_port and remote_port in {None, call.client_port})


def leave(address: str) -> None:
    """Break this process's own connections to a server."""
    process, (host, _, port) = this_process(), address.rpartition(":")
    network().sever(lambda call: call.address == (numeric(host), int(port)) and call.client is process)


def host_facts() -> object:
    """Return facts that are the same in every run."""
    from flightedl.messages.hosts import HostFacts

    return HostFacts(
        version="simulated",
        wall_s=0.0,
        cores=_CORES,
        threads=1,
        memory_bytes=1 << 28,
        memory_limit_bytes=1 << 34,
        busy_cores=1.0,
    )


def as_module() -> types.ModuleType:
    """Return the module that the product imports as ``flightedl.process.machine``."""
    made = types.ModuleType("flightedl.process.machine")
    made.__dict__.update(
        {
            name: value
            for name, value in globals().items()
            if callable(value) and value.__module__ == __name__ and name != "as_module"
        }
    )
    return made
