"""A copy of a model in Parquet files. Rows of a table are written whole at first, and then in increments.

* ``copy.json``: a ``WrittenCopy``, replaced after all other files of a copy
* ``NAME.parquet``: a parameter, replaced in each copy
* ``NAME/NUMBER.parquet``: rows of a table. ``number`` counts the copies. In the table's *base*, ``number`` equals
  ``base``, and all rows are in the file. In an *increment*, ``base`` is the number of the base on which it builds, and
  the file has the rows that have changed since the previous file, and the ids of rows that were ``removed``.

A row's present content is that in the file with the highest number. Increments are found by comparing rows with those
of the previous copy, so they are correct whatever the follower received: increments, thresholds, or a new base after a
pserver died. For the same reason, a process that continues reads the files and not the feed's positions.

A table gets a new base when there are too many increments, or when together they have more rows than the base. Then its
other files are deleted. Names of parameters and tables are percent-encoded in names of files.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from flightedl.adapters.storage import open_storage
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.errors import NotFoundError, UsageError
from flightedl.formats.columns import parameter_batches, parameter_schema
from flightedl.formats.table_files import file_of
from flightedl.messages.base import Natural, Reply, decode, encode
from flightedl.messages.feed import Position

_INDEX = "copy.json"


class WrittenTable(Reply, frozen=True, kw_only=True):
    """The files of a table."""

    #: Numbers of the files: the base, then the increments.
    numbers: list[Natural]
    #: Number of rows in the base, and in all increments.
    base_rows: Natural
    increment_rows: Natural = 0


class WrittenCopy(Reply, frozen=True, kw_only=True):
    """Description of a copy."""

    job: str
    number: Natural = 0
    #: Seconds since 1970-01-01 at which the copy was up to date.
    time_s: float = 0.0
    #: Index of a pserver -> position in its feed. The copy has all changes up to there, and may have later ones.
    positions: dict[int, Position] = msgspec.field(default_factory=dict)
    tables: dict[str, WrittenTable] = msgspec.field(default_factory=dict)


class Rows(NamedTuple):
    """Rows of a table."""

    #: (n,) int64, ascending.
    ids: npt.NDArray[np.int64]
    #: (n, dim).
    values: npt.NDArray[np.float32]

    @classmethod
    def of(cls, ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> Rows:
        """Return the rows in ascending order of their ids, which are distinct."""
        order = np.argsort(ids)
        return cls(ids[order], values[order])

    def changed_since(self, before: Rows) -> Rows:
        """Return the rows that did not exist before or had other values. NaN equals NaN."""
        if not before.ids.size:
            return self
        places = np.minimum(np.searchsorted(before.ids, self.ids), before.ids.size - 1)
        is_same = before.ids[places] == self.ids
        is_same &= (before.values[places].view(np.uint32) == self.values.view(np.uint32)).all(axis=1)
        return Rows(self.ids[~is_same], self.values[~is_same])

    def without(self, ids: npt.NDArray[np.int64]) -> Rows:
        """Return the rows with other ids."""
        is_kept = np.isin(self.ids, ids, invert=True)
        return Rows(self.ids[is_kept], self.values[is_kept])


class ParquetCopy:
    """Files of a copy, to which newer states of the model are written.

    Args:
        url: Path or URL of the directory. If it contains a copy, the copy is continued.
        job: Name of the job.
        most_increments: Maximum number of increments that follow a base.

    Raises:
        UsageError: the URL is unusable, or contains the copy of another job.
        UnavailableError: the files cannot be read at the moment.
    """

    def __init__(self, url: str, job: str, most_increments: int) -> None:
        self._storage = open_storage(url)
        self._most = most_increments
        try:
            self.written = decode(self._storage.read(_INDEX), WrittenCopy)
        except NotFoundError:
            self.written = WrittenCopy(job=job)
        if self.written.job != job:
            raise UsageError(
                f"{self._storage.url} has a copy of the job {self.written.job!r}: choose another place for {job!r}"
            )
        self._rows = {name: self._read(name, table) for name, table in self.written.tables.items()}
        for name, table in self.written.tables.items():
            self._delete_all_but(name, table.numbers)

    def write(
        self,
        specs: Iterable[ParameterSpec],
        arrays: Mapping[str, npt.NDArray[Any]],
        tables: Mapping[str, Rows],
        positions: Mapping[int, Position],
        time_s: float,
    ) -> None:
        """Write the next copy: all parameters, and the rows that have changed. See ``WrittenCopy``."""
        number, before = self.written.number + 1, self.written.tables
        for spec in specs:
            schema = parameter_schema(spec, 0, {"cut": "followed", "number": number})
            stored = arrays[spec.name].astype(spec.storage_dtype).reshape(-1)
            batches = parameter_batches(schema, spec, [stored])
            self._storage.publish(f"{_file_name(spec.name)}.parquet", file_of(schema, batches))
        found = {name: self._write_rows(name, rows, before.get(name), number) for name, rows in tables.items()}
        self.written = WrittenCopy(
            job=self.written.job, number=number, time_s=time_s, positions=dict(positions), tables=found
        )
        self._storage.publish(_INDEX, [encode(self.written)])
        for name, table in found.items():
            if table.numbers == [number]:
                self._delete_all_but(name, table.numbers)

    def _write_rows(self, name: str, rows: Rows, table: WrittenTable | None, number: int) -> WrittenTable:
        before = self._rows.get(name)
        self._rows[name] = rows
        if table is not None and before is not None and before.values.shape[1] == rows.values.shape[1]:
            changed, removed = rows.changed_since(before), before.without(rows.ids).ids
            total = table.increment_rows + changed.ids.size + removed.size
            if total == table.increment_rows:
                return table
            if len(table.numbers) <= self._most and total <= table.base_rows:
                self._publish(name, changed, removed, number, table.numbers[0])
                return WrittenTable(numbers=[*table.numbers, number], base_rows=table.base_rows, increment_rows=total)
        self._publish(name, rows, np.empty(0, np.int64), number, number)
        return WrittenTable(numbers=[number], base_rows=rows.ids.size)

    def _publish(self, name: str, rows: Rows, removed: npt.NDArray[np.int64], number: int, base: int) -> None:
        ids = np.concatenate([rows.ids, removed])
        values = np.concatenate([rows.values, np.zeros((removed.size, rows.values.shape[1]), np.float32)])
        columns = {
            "id": pa.array(ids),
            "values": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1]),
            "removed": pa.array(np.arange(ids.size) >= rows.ids.size),
            "number": pa.array(np.full(ids.size, number, np.int64)),
            "base": pa.array(np.full(ids.size, base, np.int64)),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        self._storage.publish(_place(name, number), file_of(batch.schema, [batch]))

    def _read(self, name: str, table: WrittenTable) -> Rows:
        """Return the rows in a table's files."""
        found = None
        for number in table.numbers:
            content = pq.read_table(io.BytesIO(self._storage.read(_place(name, number)))).combine_chunks()
            ids, removed = content["id"].to_numpy(), content["removed"].to_numpy()
            values = content["values"].combine_chunks().flatten().to_numpy()
            values = values.reshape(ids.size, content.schema.field("values").type.list_size)
            kept = Rows(ids[:0], values[:0]) if found is None else found.without(ids)
            ids, values = ids[~removed], values[~removed]
            found = Rows.of(np.concatenate([kept.ids, ids]), np.concatenate([kept.values, values]))
        assert found is not None, "a table has a base"
        return found

    def _delete_all_but(self, name: str, numbers: Iterable[int]) -> None:
        kept = {_place(name, number) for number in numbers}
        for file in self._storage.list(f"{_file_name(name)}/"):
            if file.name not in kept:
                self._storage.delete(file.name)


def _file_name(name: str) -> str:
    """Return the name of a parameter or table in names of files."""
    return quote(name, safe=" ")


def _place(name: str, number: int) -> str:
    return f"{_file_name(name)}/{number:08d}.parquet"
