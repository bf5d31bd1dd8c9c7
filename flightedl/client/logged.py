"""Writes what a script gives to ``job.log`` to files of the output directory, where there is one.

It is gathered where it is logged, which costs a microsecond, and written by the thread that tells the master. A
directory that cannot be written is told once, and training goes on without the files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsFloat

from flightedl.config import TrainerSettings
from flightedl.curves.files import PointFile
from flightedl.curves.gathering import Gathering
from flightedl.curves.tensorboard import EventFile, require_tensorboard
from flightedl.errors import UsageError
from flightedl.ports import Clock

_log = logging.getLogger(__name__)


def require_files(chosen: TrainerSettings) -> None:
    """Find out whether the files that are wanted can be written, before anything is begun.

    Raises:
        UsageError: a library is missing, or there is no place for them.
    """
    if chosen.tensorboard:
        require_tensorboard()
        if not chosen.output_dir:
            raise UsageError("files for TensorBoard need a place: set output_dir (FLIGHTEDL_OUTPUT_DIR), too")


class LoggedValues:
    """Of one trainer. Thread-safe; only one thread writes.

    Args:
        chosen: The settings.
        trainer: The trainer's id.
        clock: The process's.
    """

    def __init__(self, chosen: TrainerSettings, trainer: str, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gathering = Gathering(trainer, clock.now())
        self._epoch = 1
        directory = Path(chosen.output_dir)
        #: None: nothing is written, or not any more.
        self._points = PointFile(directory, trainer) if chosen.output_dir else None
        self._events = EventFile(directory, trainer) if chosen.tensorboard else None

    def batch(self, records: int) -> None:
        """A batch of so many records is through."""
        with self._lock:
            self._gathering.batch(records)

    def add(self, values: Mapping[str, SupportsFloat], weight: float, epoch: int | None) -> None:
        """Values of a batch of this epoch, from 0; None: logged outside of one."""
        if self._points is None:
            return
        with self._lock:
            self._epoch = self._epoch if epoch is None else epoch + 1
            numbers = {name: float(value) for name, value in values.items()}
            self._gathering.add(numbers, weight, self._epoch, self._clock.now(), self._clock.wall_time())

    def write(self, *, is_end: bool = False) -> None:
        """Write what is due; at the end everything."""
        if self._points is None:
            return
        with self._lock:
            points = self._gathering.take(self._clock.now(), is_end=is_end)
        try:
            if points:
                self._points.append(points)
                if self._events is not None:
                    self._events.append(points)
            if is_end and self._events is not None:
                self._events.close()
        except OSError as error:
            _log.warning("values of job.log are not written to files any more: %s", error)
            self._points = None
