"""Files of logged values. Each trainer writes a file of its own, and readers of a run read all of them.

A trainer appends to ``metrics/TRAINER.csv`` in the output directory, at most twice per second; TRAINER is the id of its
process. A trainer that is killed loses the values logged since its last write; readers skip an incomplete last line. A
restarted trainer has another id, and therefore another file. At the end of a run, all files are merged into
``metrics.parquet``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from flightedl.curves.gathering import Point
from flightedl.errors import DataError, NotFoundError

#: Names, in the output directory, of the directory for the trainers' files and of the merged file.
DIRECTORY = "metrics"
MERGED = "metrics.parquet"
_HEADER = ",".join(Point._fields)
_TYPES = {"at": float, "epoch": int, "batches": int, "records": int, "value": float, "weight": float}


class PointFile:
    """A trainer's file, which is created with the first point.

    Args:
        output_dir: The job's output directory.
        trainer: The trainer's id.
    """

    def __init__(self, output_dir: Path, trainer: str) -> None:
        self._path = output_dir / DIRECTORY / f"{trainer}.csv"

    def append(self, points: Sequence[Point]) -> None:
        """Append points. Raises OSError if the file cannot be written."""
        text = io.StringIO()
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text.write(_HEADER + "\n")
        csv.writer(text, lineterminator="\n").writerows(points)
        # Write in a single call, so that a killed process rarely leaves an incomplete line.
        with self._path.open("ab", buffering=0) as file:
            file.write(text.getvalue().encode())


def read_points(run: Path) -> list[Point]:
    """Return the points logged in a run, oldest first.

    Args:
        run: Output directory of the run, or one of the files.

    Raises:
        NotFoundError: nothing was logged there.
        DataError: a file has other contents.
    """
    of_trainers = sorted((run / DIRECTORY).glob("*.csv")) or [run / MERGED]
    files = [file for file in ([run] if run.is_file() else of_trainers) if file.is_file()]
    points = [point for file in files for point in (_of_parquet(file) if file.suffix == ".parquet" else _of_csv(file))]
    if not points:
        raise NotFoundError(
            f"{run} has no logged values: name the output directory of a run whose script calls job.log, "
            f"or a file of its {DIRECTORY} directory"
        )
    return sorted(points)


def write_merged(run: Path, points: Iterable[Point]) -> None:
    """Write all points to one Parquet file in the output directory. Raises OSError if it cannot be written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = list(zip(*points, strict=True))
    part = run / f".{MERGED}"
    pq.write_table(pa.table(dict(zip(Point._fields, map(pa.array, columns), strict=True))), part)
    part.replace(run / MERGED)


def _of_csv(file: Path) -> Iterable[Point]:
    try:
        text = file.read_text("utf-8")
        # A killed process may leave an incomplete last line.
        lines = text[: text.rfind("\n") + 1].splitlines()
        if lines and lines[0] != _HEADER:
            raise DataError(f"{file} is not a file of logged values: its first line is not {_HEADER}")
        return [_point(row) for row in csv.reader(lines[1:])]
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file} cannot be read as logged values: {error}") from None


def _of_parquet(file: Path) -> Iterable[Point]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return [Point(**row) for row in pq.read_table(file, columns=list(Point._fields)).to_pylist()]
    except (OSError, pa.ArrowException, TypeError) as error:
        raise DataError(f"{file} cannot be read as logged values: {error}") from None


def _point(row: list[str]) -> Point:
    return Point(**{name: _TYPES.get(name, str)(text) for name, text in zip(Point._fields, row, strict=True)})
