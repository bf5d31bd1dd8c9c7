"""A request to read a chunk (columns, conditions), and its result (records with their numbers).

Conditions are triples (column, operator, value), all of which must hold. The operators are ``== != < <= > >= in "not
in"``. A null meets only the condition ``(column, "==", None)``; ``(column, "!=", None)`` selects all values that are
not null. Values come from JSON, so they may be strings for columns of dates and times.
"""

from __future__ import annotations

import contextlib
import math
import operator as operators
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.errors import DataError, UserCodeError
from flightedl.formats.chunks import AS_NAMED, TextOptions
from flightedl.formats.schemas import large_type

if TYPE_CHECKING:
    import pyarrow.compute as pc

    from flightedl.formats.chunks import Chunk

Condition = tuple[str, str, Any]

#: Size from which a column is read with large offsets. Others address up to 2 GiB.
LARGE_BYTES = (1 << 31) - 1
_NUMBER = "__flightedl_record_number__"
_COMPARED = {
    "==": operators.eq,
    "!=": operators.ne,
    "<": operators.lt,
    "<=": operators.le,
    ">": operators.gt,
    ">=": operators.ge,
}
_MEMBERSHIPS = ("in", "not in")
_ENCODINGS: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_dictionary,
    pa.types.is_run_end_encoded,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Columns and records to read from a chunk."""

    #: Schema of the dataset, which determines the order of columns and their types.
    schema: pa.Schema
    #: Columns to return; None: all.
    columns: tuple[str, ...] | None = None
    conditions: tuple[Condition, ...] = ()
    #: Number of records in the chunk, or None if unknown. Used only by text formats.
    records: int | None = None
    text: TextOptions = AS_NAMED

    def needed(self) -> list[str] | None:
        """Return the columns to read: the requested columns, then columns that only conditions use. None means all."""
        return None if self.columns is None else list(dict.fromkeys((*self.columns, *self.tested)))

    @property
    def tested(self) -> list[str]:
        """Columns that conditions use."""
        return list(dict.fromkeys(column for column, _, _ in self.conditions))

    @property
    def shown(self) -> pa.Schema:
        """Schema of the result. With ``decode``, without columns that only decoding makes."""
        if self.columns is None:
            return self.schema
        return pa.schema([self.schema.field(name) for name in self.columns if name in self.schema.names])


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Records of a chunk: either all of them, or those that meet the conditions."""

    table: pa.Table
    #: Numbers of the records in the chunk, (len(table),), ascending. None stands for 0 to len(table) - 1.
    numbers: npt.NDArray[np.int64] | None = None


def conformed(table: pa.Table, request: ReadRequest, chunk: Chunk) -> pa.Table:
    """Return the table with the types of the dataset, or with large offsets where a column needs them.

    Args:
        table: Records of the chunk with the types of its file.
        request: The request, which has the dataset's schema.
        chunk: The chunk.

    Raises:
        UserCodeError: a value does not fit its column's type, which types= can set. It names the file and the record.
    """
    fields, columns = [], []
    for found, column in zip(table.schema, table.columns, strict=True):
        known = request.schema.get_field_index(found.name)
        field = found if known < 0 else request.schema.field(known)
        column = column if found.type == field.type else plain_column(column)  # noqa: PLW2901
        kind = large_type(field.type) if column.nbytes > LARGE_BYTES else field.type
        if column.type != kind:
            try:
                column = cast_exactly(column, kind)  # noqa: PLW2901
            except pa.ArrowNotImplementedError:
                raise DataError(
                    f"{chunk.url}: column {field.name!r} is {found.type}, which cannot be read as {kind}"
                ) from None
            except pa.ArrowInvalid as error:
                record = chunk.first_record + first_misfit(column, kind)
                raise UserCodeError(
                    f"{chunk.url}, record {record + 1}: the value of {field.name!r} ({found.type}) does not fit "
                    f"{kind}: {str(error)[:200]}"
                ) from None
        fields.append(field.with_type(kind))
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the column without dictionaries, runs and list views, also inside of nested values."""
    if not _is_encoded(column.type):
        return column
    return pa.chunked_array([_plain(part) for part in column.chunks or [pa.nulls(0, column.type)]])


def _is_encoded(kind: pa.DataType) -> bool:
    if any(is_encoded(kind) for is_encoded in _ENCODINGS):
        return True
    return any(_is_encoded(kind.field(number).type) for number in range(kind.num_fields))


def _plain(values: Any) -> Any:
    """Decode an array. pyarrow's cast rejects some encodings, and loses the last offset of list views."""
    types, kind = pa.types, values.type
    if types.is_string(kind) or types.is_string_view(kind):
        return values.cast(pa.large_string())  # Decoding may make it larger than 2 GiB.
    if types.is_binary(kind) or types.is_binary_view(kind):
        return values.cast(pa.large_binary())
    if types.is_dictionary(kind):
        return _plain(values.dictionary).take(values.indices)
    if types.is_run_end_encoded(kind):
        ends = np.clip(np.asarray(values.run_ends) - values.offset, 0, len(values))
        return _plain(values.values).take(pa.array(np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))))
    if types.is_struct(kind):
        parts = [_plain(values.field(number)) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, [field.name for field in kind], mask=values.is_null())
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        sizes = np.where(values.is_valid(), values.sizes, 0)
        offsets = pa.array(np.append(0, np.cumsum(sizes)))
        return pa.LargeListArray.from_arrays(offsets, _plain(values.flatten()), mask=values.is_null())
    if types.is_list(kind) or types.is_large_list(kind):
        new = pa.list_ if types.is_list(kind) else pa.large_list
        inner = _plain(values.values)
        return pa.Array.from_buffers(
            new(inner.type), len(values), values.buffers()[:2], offset=values.offset, children=[inner]
        )
    return values


def cast_exactly(column: Any, kind: pa.DataType) -> Any:
    """Convert a column or an array. Raises ArrowInvalid if a value does not fit, even if Arrow makes it infinite."""
    found = column.cast(kind)
    if pa.types.is_floating(kind) and pa.types.is_floating(column.type) and kind.bit_width < column.type.bit_width:
        import pyarrow.compute as pc

        if not pc.is_inf(found).equals(pc.is_inf(column)):
            raise pa.ArrowInvalid("it is too large")  # Arrow would make it infinite.
    return found


def first_misfit(column: pa.ChunkedArray, kind: pa.DataType) -> int:
    """Return the number of the first value that cannot be converted."""
    first, end = 0, len(column)
    while end - first > 1:
        middle = (first + end) // 2
        try:
            cast_exactly(column.slice(first, middle - first), kind)
            first = middle
        except pa.ArrowInvalid:
            end = middle
    return first


def require_columns(schema: pa.Schema, request: ReadRequest, what: str) -> None:
    """Check that all requested columns exist, and that all conditions fit the types of their columns.

    Raises:
        DataError: a column is missing. The message names it, and ``what``: the file or dataset that lacks it.
    """
    names = set(schema.names)
    for column in request.needed() or request.tested:
        if column not in names:
            known = ", ".join(schema.names[:20]) + (", ..." if len(schema.names) > 20 else "")
            raise DataError(f"there is no column {column!r} in {what}: it has {known or 'no columns'}")
    expression(request.schema, request.conditions)


def expression(schema: pa.Schema, conditions: Sequence[Condition]) -> pc.Expression | None:
    """Combine the conditions into one expression over records of ``schema``. Return None if there are none.

    Raises:
        DataError: an operator is unknown, or a value cannot be compared with its column.
    """
    combined: pc.Expression | None = None
    columns = {column for column, _, _ in conditions}
    try:
        for condition in conditions:
            term = _term(schema.field(condition[0]), condition)
            combined = term if combined is None else combined & term
        if combined is not None:
            pa.schema([schema.field(column) for column in columns]).empty_table().filter(combined)
    except pa.ArrowException as error:
        shown = ", ".join(f"{column} is {schema.field(column).type}" for column in sorted(columns))
        raise DataError(f"the filter does not fit its columns ({shown}): {str(error)[:200]}") from None
    return combined


def select(table: pa.Table, request: ReadRequest) -> Records:
    """Apply the conditions, then select the requested columns in the requested order."""
    shown = request.shown.names
    where = expression(request.schema, request.conditions)
    if where is None:
        return Records(table.select(shown))
    table = table.append_column(_NUMBER, pa.array(np.arange(len(table), dtype=np.int64)))
    with filtering(request.conditions):
        table = table.filter(where)
    return Records(table.select(shown), table.column(_NUMBER).to_numpy())


@contextlib.contextmanager
def filtering(conditions: Sequence[Condition]) -> Iterator[None]:
    """Convert an error of a filter to a UserCodeError, because the records were decoded and are not corrupt."""
    try:
        yield
    except MemoryError:
        raise
    except pa.ArrowException as error:
        shown = " and ".join(f"{column} {operator} {value!r:.80}" for column, operator, value in conditions)
        raise UserCodeError(f"the filter {shown} cannot be applied to a record: {str(error)[:200]}") from None


def empty(request: ReadRequest) -> Records:
    """Return the result for a chunk without any record that meets the conditions."""
    return Records(request.shown.empty_table(), np.zeros(0, np.int64))


def _term(field: pa.Field, condition: Condition) -> pc.Expression:
    # Imported lazily: the import creates 300 functions, and only conditions need them.
    import pyarrow.compute as pc

    column, operator, value = condition
    reference = pc.field(column)
    if operator in _COMPARED:
        if value is None:
            if operator in ("==", "!="):
                return reference.is_null() if operator == "==" else reference.is_valid()
            raise DataError(f"the filter on {column} compares with None, which only == and != support")
        if pa.types.is_integer(field.type) and isinstance(value, int | float):
            return _whole_number_term(reference, field.type, operator, value)
        return _COMPARED[operator](reference, _scalar(field, value))
    if operator not in _MEMBERSHIPS:
        known = ", ".join((*_COMPARED, *_MEMBERSHIPS))
        raise DataError(f"the filter on {column} has an unknown operator {operator!r}: use one of {known}")
    if not isinstance(value, list | tuple | set | frozenset) or any(item is None for item in value):
        raise DataError(f"the filter on {column} needs a list of values after {operator!r}")
    if pa.types.is_integer(field.type):
        value = [item for item in value if not isinstance(item, int | float) or _is_of(field.type, item)]
    scalars = [_scalar(field, item) for item in value]
    kinds = {scalar.type for scalar in scalars} - {field.type}
    if kinds:
        raise DataError(f"the filter on {column} has values of different types: {field.type} and {kinds.pop()}")
    options = [scalar.as_py() for scalar in scalars if scalar.equals(scalar)]  # NaN equals nothing.
    if pa.types.is_floating(field.type) and 0 in options:
        options += [0.0, -0.0]  # They are equal, but Arrow tells them apart.
    inside = reference.isin(pa.array(options, field.type))
    return inside if operator == "in" else ~inside & reference.is_valid()


def _is_of(kind: pa.DataType, number: float) -> bool:
    """True if an integer type has this number."""
    limits = np.iinfo(str(kind))
    return limits.min <= number <= limits.max and number == int(number)


def _whole_number_term(reference: pc.Expression, kind: pa.DataType, operator: str, value: float) -> pc.Expression:
    """Compare a column of integers with any number. pyarrow would round, or fail if the type has no such number."""
    import pyarrow.compute as pc

    if not _is_of(kind, value) and (operator in ("==", "!=") or math.isnan(value)):
        return reference.is_valid() if operator == "!=" else pc.scalar(False)
    if not _is_of(kind, value):
        limits = np.iinfo(str(kind))
        if value < limits.min or value > limits.max:
            holds = (value > limits.max) == (operator in ("<", "<="))
            return reference.is_valid() if holds else pc.scalar(False)
        # Between two integers: n < 2.5 is n <= 2, and n > 2.5 is n > 2.
        operator, value = {"<": "<=", ">=": ">"}.get(operator, operator), math.floor(value)
    return _COMPARED[operator](reference, pa.scalar(int(value), kind))


def _scalar(field: pa.Field, value: Any) -> pa.Scalar:
    """Return the value in the type of the column, or in its inferred type if it cannot be converted."""
    if pa.types.is_floating(field.type) and isinstance(value, int | float):
        with contextlib.suppress(OverflowError):
            # In the column's own precision, so that 0.1 finds what was stored as 0.1 in float32.
            own = pa.scalar(float(value)).cast(field.type)
            if isinstance(value, float) or own.as_py() == value:
                return own
        raise DataError(f"the filter on {field.name} has a number that {field.type} cannot hold: {value!r:.80}")
    attempts: list[Callable[[], pa.Scalar]] = [
        lambda: pa.scalar(value, field.type),
        lambda: pa.scalar(value).cast(field.type),
        lambda: pa.scalar(value),
    ]
    for attempt in attempts:
        try:
            scalar = attempt()
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
        if scalar.as_py() == value or isinstance(value, str):
            return scalar
    raise DataError(f"the filter on {field.name} has a value that no column can hold: {value!r:.80}")
