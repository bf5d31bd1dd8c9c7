"""Arrow columns of parameters and tables, for any Flight client.

* A parameter has one column, ``value``: a number for each element of a vector, or a list of fixed size for each row of
  a matrix (see ``domain.model.row_ranges``). The schema's metadata contains the shape and the number of the first row.
* A table has the columns ``id`` and ``values``, as in ``table_files``. On request, it also has ``version`` (the version
  at the row's last update, if the table's rows can expire), ``updates``, and the optimizer's slots.

bfloat16 values are sent as float32, because Arrow has no bfloat16. Readers get the same values as trainers: those of
16-bit parameters are rounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.row_ranges import is_matrix, width_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import MessageError
from flightedl.formats.row_batches import StoredRows
from flightedl.formats.table_files import batch_of, schema_of
from flightedl.kernels.half_precision import float32_of, shortened

Array = npt.NDArray[np.generic]

#: Size of a batch in bytes, chosen because Flight is fastest with it.
_BATCH_BYTES = 1 << 20
#: Default columns of a parameter and of a table.
VALUE = "value"
USUAL = ("id", "values")
VERSION = pa.field("version", pa.int64(), nullable=False)
_TYPES = {"float32": pa.float32(), "float64": pa.float64(), "float16": pa.float16(), "bfloat16": pa.float32()}


def parameter_schema(
    spec: ParameterSpec, start: int, about: Mapping[str, object], columns: Sequence[str] | None = None
) -> pa.Schema:
    """Return the schema of some rows of a parameter.

    Args:
        spec: The parameter.
        start: Number of the first row.
        about: Further metadata.
        columns: Requested columns.

    Raises:
        MessageError: a column does not exist.
    """
    _require_columns(spec.name, columns, (VALUE,))
    element = _TYPES[spec.dtype]
    kind = pa.list_(element, width_of(spec)) if is_matrix(spec) else element
    return pa.schema(
        [pa.field(VALUE, kind, nullable=False)],
        _metadata(
            {"name": spec.name, "kind": "parameter", "dtype": spec.dtype, "shape": spec.shape, "start": start, **about}
        ),
    )


def table_schema(spec: TableSpec, about: Mapping[str, object], columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the schema of rows of a table. Raises MessageError if there is no such column."""
    whole = schema_of(spec, has_slots=True)
    fields = {field.name: field for field in whole}
    if spec.evict is not None and spec.evict.needs_version:
        fields[VERSION.name] = VERSION
    chosen = _require_columns(spec.name, columns, tuple(fields), USUAL)
    about = {"name": spec.name, "kind": "table", "dtype": spec.dtype, "dim": spec.dim, **about}
    return pa.schema([fields[name] for name in chosen], {**whole.metadata, **_metadata(about)})


def _metadata(about: Mapping[str, object]) -> dict[bytes, bytes]:
    return {
        f"flightedl.{name}".encode(): (value if isinstance(value, str) else json.dumps(value)).encode()
        for name, value in about.items()
    }


def _require_columns(
    name: str, columns: Sequence[str] | None, known: Sequence[str], usual: Sequence[str] = ()
) -> Sequence[str]:
    chosen = columns or usual or known
    for column in chosen:
        if column not in known or list(chosen).count(column) > 1:
            raise MessageError(
                f"column {column!r:.80} of {name!r:.80} cannot be read: name each of {', '.join(known)} at most once"
            )
    return chosen


def parameter_batches(schema: pa.Schema, spec: ParameterSpec, pieces: Iterable[Array]) -> Iterator[pa.RecordBatch]:
    """Yield batches of a parameter's rows. Values are not copied if that can be avoided.

    Args:
        schema: Output of ``parameter_schema``.
        spec: The parameter.
        pieces: (n,) stored elements, which together form whole rows.
    """
    kind = schema.field(0).type
    width = kind.list_size if pa.types.is_fixed_size_list(kind) else 1
    begun = np.empty(0, spec.storage_dtype)
    for piece in pieces:
        if begun.size:
            taken = min(width - begun.size, piece.size)
            begun, piece = np.concatenate([begun, piece[:taken]]), piece[taken:]  # noqa: PLW2901 - the rest of it
            if begun.size < width:
                continue
            yield _rows(schema, spec, begun)
        end = piece.size // width * width
        begun = piece[end:].copy()
        step = max(_BATCH_BYTES // (width * piece.itemsize), 1) * width
        for first in range(0, end, step):
            yield _rows(schema, spec, piece[first : min(first + step, end)])
    assert not begun.size, "the pieces end within a row"


def _rows(schema: pa.Schema, spec: ParameterSpec, stored: Array) -> pa.RecordBatch:
    kind = schema.field(0).type
    values: Any = stored
    if spec.short_kind:
        bits = shortened(np.ascontiguousarray(stored, np.float32), spec.short_kind)
        values = float32_of(bits, spec.dtype) if spec.dtype == "bfloat16" else bits.view(np.float16)
    is_list = pa.types.is_fixed_size_list(kind)
    flat = pa.Array.from_buffers(kind.value_type if is_list else kind, values.size, [None, pa.py_buffer(values)])
    column = pa.FixedSizeListArray.from_arrays(flat, type=kind) if is_list else flat
    return pa.RecordBatch.from_arrays([column], schema=schema)


def table_batches(schema: pa.Schema, spec: TableSpec, rows: Iterable[StoredRows]) -> Iterator[pa.RecordBatch]:
    """Yield batches of a table's rows. ``schema`` is the output of ``table_schema``."""
    has_slots = not {*USUAL, VERSION.name}.issuperset(schema.names)
    whole_schema = schema_of(spec, has_slots=has_slots)
    for some in rows:
        if len(some.ids):
            whole = batch_of(spec, some, whole_schema, has_slots=has_slots)
            columns = [
                pa.array(some.versions.astype(np.int64)) if name == VERSION.name else whole.column(name)
                for name in schema.names
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)
