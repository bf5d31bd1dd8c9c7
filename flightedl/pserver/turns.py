"""The pservers of one machine are made ready by turns: as many at a time as there are processors.

When all of them come back at once, each would need as long as all together, and be kept from renewing its lease all the
while. A turn is a lock on a file, which ends with its process. Who has waited for ``patience_s`` goes on without one: a
holder may be frozen, or wait for a store.

Not guaranteed: anything. Where the file cannot be made or locked, nobody waits.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

_LOOK_S = 0.1


class Turns:
    """The turns of one user's processes on this machine.

    Args:
        stop: Set when nobody wants one any more.
        at_once: How many may have one at a time; None: as many as there are processors.
        patience_s: How long to wait for one.
        folder: Where the files lie; None: the system's for temporary files.
    """

    def __init__(
        self,
        stop: threading.Event,
        *,
        at_once: int | None = None,
        patience_s: float = 15.0,
        folder: Path | None = None,
    ) -> None:
        self._stop = stop
        self._patience_s = patience_s
        place = folder or Path(tempfile.gettempdir())
        count = at_once or os.cpu_count() or 1
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._paths = [place / f"flightedl-{user}-starting-{number}.lock" for number in range(count)]

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Wait for a turn and have it for the ``with`` block; whether it is one."""
        descriptor = self._taken()
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _taken(self) -> int | None:
        looks = int(self._patience_s / _LOOK_S)
        for _ in range(looks):
            try:
                for path in self._paths:
                    if (descriptor := _locked(path)) is not None:
                        return descriptor
            except OSError:
                return None
            if self._stop.wait(_LOOK_S):
                return None
        return None


def _locked(path: Path) -> int | None:
    """The descriptor of a file that nobody else has locked; None: somebody has.

    Raises:
        OSError: it cannot be made or locked.
    """
    if fcntl is None:
        raise OSError("there are no locks on files")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
