"""The pservers of one machine are made ready by turns: as many at a time as there are processors.

Otherwise each would take as long as all together, and could not renew its lease in time. A turn is a name in Linux's
abstract namespace of sockets: one process has it, and it ends with its process. A process that has waited for
``patience_s`` goes on without a turn, because a holder may be frozen. Where there are no such names, nobody waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator

_LOOK_S = 0.1


class Turns:
    """The turns of one user's processes on this machine.

    Args:
        stop: Set when nobody wants one any more.
        at_once: How many may have one at a time; None: as many as there are processors.
        patience_s: How long to wait for one.
        purpose: Turns for another purpose are other ones.
    """

    def __init__(
        self,
        stop: threading.Event,
        *,
        at_once: int | None = None,
        patience_s: float = 15.0,
        purpose: str = "pserver-starts",
    ) -> None:
        self._stop = stop
        self._patience_s = patience_s
        count = at_once or os.cpu_count() or 1
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._names = [f"\0flightedl-{user}-{purpose}-{number}" for number in range(count)]

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Wait for a turn and have it for the ``with`` block; whether it is one."""
        held = self._taken()
        try:
            yield held is not None
        finally:
            if held is not None:
                held.close()

    def _taken(self) -> socket.socket | None:
        for _ in range(int(self._patience_s / _LOOK_S)):
            try:
                for name in self._names:
                    if (held := _held(name)) is not None:
                        return held
            except OSError:
                return None
            if self._stop.wait(_LOOK_S):
                return None
        return None


def _held(name: str) -> socket.socket | None:
    """What holds the name; None: another process has it.

    Raises:
        OSError: this system has no abstract names.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("there are no abstract names of sockets")
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(name)
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return held
