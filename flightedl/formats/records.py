"""A request to read a chunk (columns, conditions), and its result (records with their numbers).

Conditions are triples (column, operator, value), all of which must hold. The operators are ``== != < <= > >= in "not
in"``. A null meets only the condition ``(column, "==", None)``; ``(column, "!=", None)`` selects all values that are
not null. Values come from JSON, so they may be strings for columns of dates and times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.errors import DataError

if TYPE_CHECKING:
    import pyarrow.compute as pc

Condition = tuple[str, str, Any]

_NUMBER = "__flightedl_record_number__"
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_MEMBERSHIPS = ("in", "not in")


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Columns and records to read from a chunk."""

    #: Columns to return; None: all.
    columns: tuple[str, ...] | None = None
    conditions: tuple[Condition, ...] = ()
    #: Schema of the dataset, which determines the order of columns and, for text formats, their types.
    schema: pa.Schema | None = None
    #: Number of records in the chunk, or None if unknown. Used only by text formats.
    records: int | None = None

    def needed(self) -> tuple[str, ...] | None:
        """Return the columns to read: the requested columns, then columns that only conditions use. None means all."""
        if self.columns is None:
            return None
        return tuple(dict.fromkeys((*self.columns, *(column for column, _, _ in self.conditions))))

    def shown(self, schema: pa.Schema) -> tuple[str, ...]:
        """Return the columns of the result, in order, for records with this schema."""
        names: Sequence[str] = (schema if self.schema is None else self.schema).names
        return tuple(names) if self.columns is None else self.columns


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Records of a chunk: either all of them, or those that meet the conditions."""

    table: pa.Table
    #: Numbers of the records in the chunk, (len(table),), ascending. None stands for 0 to len(table) - 1.
    numbers: npt.NDArray[np.int64] | None = None


def require_columns(schema: pa.Schema, request: ReadRequest, what: str) -> None:
    """Check that all requested columns exist, and that all conditions fit the types of their columns.

    Raises:
        DataError: a column is missing. The message names it, and ``what``: the file or dataset that lacks it.
    """
    names = set(schema.names)
    for column in request.needed() or [column for column, _, _ in request.conditions]:
        if column not in names:
            known = ", ".join(schema.names[:20]) + (", ..." if len(schema.names) > 20 else "")
            raise DataError(f"there is no column {column!r} in {what}: it has {known or 'no columns'}")
    expression(schema, request.conditions)


def expression(schema: pa.Schema, conditions: Sequence[Condition]) -> pc.Expression | None:
    """Combine the conditions into one expression over records of ``schema``. Return None if there are none.

    Raises:
        DataError: an operator is unknown, or a value cannot be compared with its column.
    """
    combined: pc.Expression | None = None
    for condition in conditions:
        term = _term(schema.field(condition[0]), condition)
        combined = term if combined is None else combined & term
    if combined is not None:
        columns = {column for column, _, _ in conditions}
        try:
            pa.schema([schema.field(column) for column in columns]).empty_table().filter(combined)
        except pa.ArrowException as error:
            shown = ", ".join(f"{column} is {schema.field(column).type}" for column in sorted(columns))
            raise DataError(f"the filter does not fit its columns ({shown}): {str(error)[:200]}") from None
    return combined


def select(table: pa.Table, request: ReadRequest) -> Records:
    """Apply the conditions, then select the requested columns in the requested order."""
    shown = list(request.shown(table.schema))
    where = expression(table.schema, request.conditions)
    if where is None:
        return Records(table.select(shown))
    table = table.append_column(_NUMBER, pa.array(np.arange(len(table), dtype=np.int64))).filter(where)
    return Records(table.select(shown), table.column(_NUMBER).to_numpy())


def empty(schema: pa.Schema, request: ReadRequest) -> Records:
    """Return the result for a chunk without any record that meets the conditions."""
    fields = [schema.field(name) for name in request.shown(schema)]
    return Records(pa.schema(fields).empty_table(), np.zeros(0, np.int64))


def _term(field: pa.Field, condition: Condition) -> pc.Expression:
    # Imported lazily: the import creates 300 functions, and only conditions need them.
    import pyarrow.compute as pc

    column, operator, value = condition
    reference = pc.field(column)
    if operator in _COMPARISONS:
        if value is None:
            if operator in ("==", "!="):
                return reference.is_null() if operator == "==" else reference.is_valid()
            raise DataError(f"the filter on {column} compares with None, which only == and != support")
        wanted = _scalar(field, value)
        return {
            "==": lambda: reference == wanted,
            "!=": lambda: reference != wanted,
            "<": lambda: reference < wanted,
            "<=": lambda: reference <= wanted,
            ">": lambda: reference > wanted,
            ">=": lambda: reference >= wanted,
        }[operator]()
    if operator not in _MEMBERSHIPS:
        known = ", ".join((*_COMPARISONS, *_MEMBERSHIPS))
        raise DataError(f"the filter on {column} has an unknown operator {operator!r}: use one of {known}")
    if not isinstance(value, list | tuple | set | frozenset) or any(item is None for item in value):
        raise DataError(f"the filter on {column} needs a list of values after {operator!r}")
    scalars = [_scalar(field, item) for item in value]
    kinds = {scalar.type for scalar in scalars} or {field.type}
    try:
        # pyarrow infers a common type for mixed values, but might infer too narrow a type for values of a single type.
        options = pa.array([scalar.as_py() for scalar in scalars], kinds.pop() if len(kinds) == 1 else None)
        options = options.cast(field.type) if _casts(options, field.type) else options
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"the filter on {column} has values of different types: {str(error)[:200]}") from None
    inside = reference.isin(options)
    return inside if operator == "in" else ~inside & reference.is_valid()


def _casts(options: pa.Array, kind: pa.DataType) -> bool:
    try:
        options.cast(kind)
    except pa.ArrowException:
        return False
    return True


def _scalar(field: pa.Field, value: Any) -> pa.Scalar:
    """Return the value in the type of the column, or in its inferred type if it cannot be converted."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    attempts: list[Callable[[], pa.Scalar]] = [
        lambda: pa.scalar(value, kind),
        lambda: pa.scalar(value).cast(kind),
        lambda: pa.scalar(value),
    ]
    for attempt in attempts:
        try:
            scalar = attempt()
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
        if scalar.as_py() == value or isinstance(value, str):
            return scalar
    raise DataError(f"the filter on {field.name} has a value that no column can hold: {value!r}")
