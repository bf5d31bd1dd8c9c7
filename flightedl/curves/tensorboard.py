"""The same values as event files, which TensorBoard shows while a job runs.

Each trainer is a run of its own there, ``tensorboard/TRAINER`` of the output directory; the step of a point is how many
batches the trainer has worked through.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flightedl.curves.gathering import Point
from flightedl.process.importing import require

DIRECTORY = "tensorboard"


def require_tensorboard() -> None:
    """Find out, without an import, whether event files can be written.

    Raises:
        UsageError: the library is missing.
    """
    require("tensorboardX", "writing files for TensorBoard", "tensorboard")


class EventFile:
    """Where a trainer writes; the file is made with the first point.

    Args:
        output_dir: The job's output directory.
        trainer: The trainer's id.
    """

    def __init__(self, output_dir: Path, trainer: str) -> None:
        self._directory = output_dir / DIRECTORY / trainer
        self._writer: Any = None

    def append(self, points: Iterable[Point]) -> None:
        """Add some.

        Raises:
            OSError: the file cannot be written.
        """
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._directory))
        for point in points:
            self._writer.add_scalar(point.name, point.value, point.batches, walltime=point.at)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
