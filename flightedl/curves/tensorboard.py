"""Logged values as event files, which TensorBoard can show while a job is running.

Each trainer is a separate run in TensorBoard, ``tensorboard/TRAINER`` in the output directory. The step of a point is
the number of batches that the trainer had processed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flightedl.curves.gathering import Point
from flightedl.process.importing import require

DIRECTORY = "tensorboard"


def require_tensorboard() -> None:
    """Raise UsageError unless the library is installed. This does not import it."""
    require("tensorboardX", "writing files for TensorBoard", "tensorboard")


class EventFile:
    """A trainer's event file, which is created with the first point.

    Args:
        output_dir: The job's output directory.
        trainer: The trainer's id.
    """

    def __init__(self, output_dir: Path, trainer: str) -> None:
        self._directory = output_dir / DIRECTORY / trainer
        self._writer: Any = None

    def append(self, points: Iterable[Point]) -> None:
        """Append points. Raises OSError if the file cannot be written."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._directory))
        for point in points:
            self._writer.add_scalar(point.name, point.value, point.batches, walltime=point.at)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
