"""Everything that a process asks of its machine: its name, ports, connections, signals and memory.

A simulation, in which all processes of a job share one real process, replaces this module.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

from flightedl.config import family_of, require_numeric
from flightedl.errors import UsageError
from flightedl.process.free_memory import give_back
from flightedl.process.host import host_facts
from flightedl.process.socket_abort import abort_connections, leave
from flightedl.process.startup_memory import release_startup_memory
from flightedl.process.tuning import allow_many_connections, apply, avoid_preemption, defer_pandas

__all__ = [
    "abort_connections",
    "avoid_preemption",
    "give_back",
    "hold_name",
    "host_facts",
    "host_name",
    "leave",
    "on_termination",
    "process_id",
    "refuses",
    "release_startup_memory",
    "require_bindable",
    "set_garbage_aside",
    "tune_server",
    "tune_trainer",
]


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def process_id() -> int:
    """Return the number of this process on its machine."""
    return os.getpid()


def tune_server() -> None:
    """Apply the settings of a server process, and print stack traces if it crashes."""
    apply()
    allow_many_connections()
    faulthandler.enable()


def tune_trainer() -> None:
    """Apply the settings of a process that connects to a job."""
    apply()
    defer_pandas()


def on_termination(end: Callable[[str], None]) -> None:
    """Call ``end`` with the reason when this process receives SIGTERM or SIGINT."""
    signal.signal(signal.SIGTERM, lambda *_: end("terminated"))
    signal.signal(signal.SIGINT, lambda *_: end("interrupted"))


def set_garbage_aside() -> None:
    """Exclude all present objects from future garbage collections."""
    gc.collect()
    gc.freeze()


def require_bindable(host: str, port: int) -> None:
    """Raise UsageError unless a server can listen on this numeric address."""
    require_numeric(host)
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"cannot listen on {host} port {port} ({error.strerror}): choose another port") from None


def refuses(address: str, timeout_s: float) -> bool:
    """True if no process listens at ``host:port``, according to the machine there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def hold_name(name: str) -> AbstractContextManager[object] | None:
    """Return what holds this abstract name on the machine until it is left, or None if another process holds the name.

    Raises:
        OSError: This system does not support abstract names.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no abstract socket names")
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(name)
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return held
