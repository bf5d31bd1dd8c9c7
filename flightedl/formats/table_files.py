"""Rows of a table in a separate Parquet file, with a column of ids and a column of values.

* ``id``: int64. Ids of 2**63 and above appear as negative numbers. The id of a string is its hash, by which its row is
  looked up.
* ``values``: a list of ``dim`` float32, or of float16 (halffloat) for a float16 table. bfloat16 values are written as
  float32.
* With slots: ``updates`` (int64), and one float32 column for each optimizer slot, which contains numbers or lists of
  ``dim`` numbers.

Files from other programs can be read: ids may be integers of any width, strings or bytes, and values may be any floats
in lists of fixed or variable size. Unknown columns are ignored, and so are slots of an optimizer other than the
table's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from flightedl.domain.tables.placement import as_ids, ids_of_texts
from flightedl.domain.tables.spec import TableSpec, slots_of_new_rows
from flightedl.errors import DataError
from flightedl.formats.parquet import Footer
from flightedl.formats.row_batches import ROWS_OF, StoredRows
from flightedl.formats.sinks import PartsSink
from flightedl.formats.sources import opened, parsing
from flightedl.kernels.half_precision import float32_of, shortened
from flightedl.ports import Files

Floats = npt.NDArray[np.float32]

_ROWS_A_GROUP = 1 << 17
#: Rows read at a time.
_ROWS_AT_ONCE = 1 << 16
_OPTIMIZER = b"flightedl.optimizer"
_LARGEST_HALF = 65504.0
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


class FileRows(NamedTuple):
    """Some rows of a file."""

    ids: npt.NDArray[np.uint64]
    #: (n, dim).
    values: Floats
    #: (n,) uint32, and (n, total size of all slots); None if the file has no slots of this optimizer.
    updates: npt.NDArray[np.uint32] | None
    slots: Floats | None

    def chosen(self, which: npt.NDArray[Any]) -> FileRows:
        """Return some of the rows, given their numbers or a mask."""
        return FileRows(*(None if column is None else column[which] for column in self))  # type: ignore[arg-type]

    def stored(self, spec: TableSpec, table: int = 0) -> StoredRows:
        """Return the rows as of version and epoch 0. They have the state of new rows if the file has no slots."""
        count, values = len(self.ids), as_kept(self.values, spec.dtype)
        zeros = np.zeros(count, np.uint32)
        updates = zeros if self.updates is None else self.updates
        slots = slots_of_new_rows(spec, count) if self.slots is None else self.slots
        kind = f"{ROWS_OF}{values.dtype.name}"
        return StoredRows(0, table, kind, self.ids, updates, zeros, zeros, slots, values)


# --- writing ---


def schema_of(spec: TableSpec, *, has_slots: bool) -> pa.Schema:
    """Return the schema of a table's file."""
    element = pa.float16() if spec.dtype == "float16" else pa.float32()
    fields = [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("values", pa.list_(element, spec.dim), nullable=False),
    ]
    if has_slots:
        fields.append(pa.field("updates", pa.int64(), nullable=False))
        fields += [
            pa.field(slot.name, pa.list_(pa.float32(), spec.dim) if slot.per_element else pa.float32(), nullable=False)
            for slot in spec.optimizer.slots
        ]
    return pa.schema(
        fields, {b"flightedl.table": spec.name.encode(), _OPTIMIZER: type(spec.optimizer).__name__.encode()}
    )


def table_file(spec: TableSpec, rows: Iterable[StoredRows], *, has_slots: bool = False) -> Iterator[bytes]:
    """Yield the parts of a file that contains these rows."""
    yield from file_of(schema_of(spec, has_slots=has_slots), batches_of(spec, rows, has_slots=has_slots))


def batches_of(spec: TableSpec, rows: Iterable[StoredRows], *, has_slots: bool = False) -> Iterator[pa.RecordBatch]:
    """Return the record batches of a file that contains these rows."""
    schema = schema_of(spec, has_slots=has_slots)
    return (batch_of(spec, some, schema, has_slots=has_slots) for some in rows if len(some.ids))


def file_of(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    """Yield the parts of a Parquet file that contains these batches."""
    sink = PartsSink()
    with pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"), schema, compression="zstd", write_page_checksum=True
    ) as writer:
        waiting: list[pa.RecordBatch] = []
        for some in batches:
            waiting.append(some)
            if sum(len(batch) for batch in waiting) >= _ROWS_A_GROUP:
                writer.write_table(pa.Table.from_batches(waiting, schema), row_group_size=2 * _ROWS_A_GROUP)
                waiting.clear()
                yield sink.take()
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting, schema))
    yield sink.take()


def batch_of(spec: TableSpec, rows: StoredRows, schema: pa.Schema, *, has_slots: bool) -> pa.RecordBatch:
    """Return some rows as a record batch. ``schema`` is the output of ``schema_of``."""
    columns = [rows.ids.view(np.int64), _values(spec, rows)]
    if has_slots:
        columns.append(rows.updates.astype(np.int64))
        at = 0
        for slot in spec.optimizer.slots:
            width = slot.width(spec.dim)
            columns.append(np.ascontiguousarray(rows.slots[:, at : at + width]))
            at += width
    return pa.RecordBatch.from_arrays(
        [_column(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _values(spec: TableSpec, rows: StoredRows) -> npt.NDArray[Any]:
    if spec.dtype == "float32":
        return rows.values
    bits = np.ascontiguousarray(rows.values)
    if spec.dtype == "float16":
        return bits.view(np.float16)
    return float32_of(bits, spec.dtype)


def _column(array: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1), kind.value_type), type=kind)
    return pa.array(array.reshape(-1), kind)


# --- reading ---


def require_table_file(files: Files, url: str, spec: TableSpec) -> None:
    """Raise DataError unless the file's footer describes rows of this table."""
    with opened(files, url) as source:
        require_rows(url, Footer(source).schema, spec)


def require_rows(url: str, schema: pa.Schema, spec: TableSpec) -> None:
    """Raise DataError unless the schema of a file describes rows of this table."""
    for name in ("id", "values"):
        if schema.names.count(name) != 1:
            raise DataError(f"{url} has no column {name!r}: a table's rows are in the columns id and values")
    ids, values = schema.field("id").type, schema.field("values").type
    if not (pa.types.is_integer(ids) or _is_text(ids)):
        raise DataError(f"{url} has ids of type {ids}: they must be integers or texts")
    if not is_list(values) or not pa.types.is_floating(values.value_type):
        raise DataError(f"{url} has values of type {values}: they must be lists of floats")
    if pa.types.is_fixed_size_list(values) and values.list_size != spec.dim:
        raise DataError(f"{url} has rows of {values.list_size} values, and table {spec.name!r} has dim {spec.dim}")


def _is_text(kind: pa.DataType) -> bool:
    return any(is_(kind) for is_ in _TEXTS)


def is_list(kind: pa.DataType) -> bool:
    """True if a column of this type contains lists."""
    return bool(pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind))


def read_table_file(files: Files, url: str, spec: TableSpec) -> Iterator[FileRows]:
    """Yield the rows in a file in batches.

    Raises:
        DataError: the file contains no rows for this table, is damaged, or cannot be read.
    """
    with opened(files, url) as source:
        footer = Footer(source)
        require_rows(url, footer.schema, spec)
        slots = [slot.name for slot in spec.optimizer.slots]
        has_slots = _has_slots(footer, spec)
        names = ["id", "values", *(["updates", *slots] if has_slots else [])]
        file = pq.ParquetFile(
            pa.PythonFile(source, mode="r"), metadata=footer.metadata, page_checksum_verification=True
        )
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=names, use_threads=False):
            with parsing(source, "its rows"):
                found = file_rows(url, batch, spec, slots if has_slots else None)
            yield found


def _has_slots(footer: Footer, spec: TableSpec) -> bool:
    said, wanted = footer.metadata.metadata or {}, schema_of(spec, has_slots=True)
    if said.get(_OPTIMIZER) != wanted.metadata[_OPTIMIZER]:
        return False
    names = wanted.names[2:]
    return all(footer.schema.names.count(name) == 1 for name in names) and all(
        footer.schema.field(name).type == wanted.field(name).type for name in names
    )


def file_rows(url: str, batch: pa.RecordBatch, spec: TableSpec, slots: Sequence[str] | None) -> FileRows:
    """Convert a record batch to rows. ``slots`` contains the columns of the optimizer's slots, or None to ignore them.

    Raises:
        DataError: a row has other values than ``dim`` finite numbers. The message names the file.
    """
    if any(column.null_count for column in batch.columns):
        raise DataError(f"{url} has nulls among its rows")
    column = batch.column("id")
    values = _matrix(url, batch.column("values"), spec)
    parts = [_matrix(url, batch.column(name), spec) for name in slots or ()]
    for part in (values, *parts):
        if not np.isfinite(part).all():
            worst = column[int(np.flatnonzero(~np.isfinite(part).all(axis=1))[0])].as_py()
            raise DataError(f"{url} has NaN or infinity in the row of id {worst}")
    ids = ids_of_texts(column.to_pylist()) if _is_text(column.type) else as_ids(column.to_numpy(zero_copy_only=False))
    if slots is None:
        return FileRows(ids, values, None, None)
    updates = batch.column("updates").cast(pa.uint32()).to_numpy()
    return FileRows(ids, values, updates, np.concatenate([np.empty((len(ids), 0), np.float32), *parts], axis=1))


def _matrix(url: str, column: pa.Array, spec: TableSpec) -> Floats:
    """Return a column of lists as an array (n, dim), and a column of numbers as (n, 1)."""
    if not is_list(column.type):
        numbers: Floats = column.to_numpy().astype(np.float32).reshape(-1, 1)
        return numbers
    flat: Floats = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    if flat.size != len(column) * spec.dim or not _has_size(column, spec.dim):
        raise DataError(f"{url} has a row without {spec.dim} values, which is the dim of table {spec.name!r}")
    return np.ascontiguousarray(flat.reshape(-1, spec.dim))


def _has_size(column: pa.Array, dim: int) -> bool:
    return pa.types.is_fixed_size_list(column.type) or set(np.unique(column.value_lengths().to_numpy())) <= {dim}


def as_kept(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """Return values in the dtype of a table. 16-bit values are rounded to nearest even."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        values = np.clip(values, -_LARGEST_HALF, _LARGEST_HALF)
    return shortened(values.reshape(-1), dtype).reshape(values.shape)
