"""Adjusts the number of pserver processes to the number that a running job needs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from flightedl.config import CommonSettings
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.ports import Clock

_SLICE_S = 0.5


class DesiredPservers:
    """Calls ``resize`` from its own thread after each change in the number of pservers.

    Args:
        chosen: Settings that name the job and its etcd.
        count: Number of pservers that have been started.
        clock: For access to etcd.
        resize: Starts or ends pservers.
    """

    def __init__(self, chosen: CommonSettings, count: int, clock: Clock, resize: Callable[[int], None]) -> None:
        self._chosen = chosen
        self._count = count
        self._clock = clock
        self._resize = resize
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flightedl-desired", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(3.0)

    def _run(self) -> None:
        # Imported in this thread, because the import is slow and the processes can start in the meantime.
        if self._stop.wait(_SLICE_S):
            return
        from flightedl.coordination.coordinators import open_coordinator

        with (
            contextlib.closing(open_coordinator(self._chosen, clock=self._clock)) as coordinator,
            Directory(coordinator, JobKeys(self._chosen.job), self._clock) as directory,
        ):
            while not self._stop.is_set():
                count = directory.wait_until(self._changed, _SLICE_S)
                if count is not None:
                    self._count = count
                    self._resize(count)

    def _changed(self, directory: Directory) -> int | None:
        count = directory.ps_desired()
        return None if count == self._count else count
