"""The common schema of a dataset's files.

Files that contain their schema (Parquet, Arrow, RecordIO) must have the same columns with the same types, in any order.
Nullability and metadata are ignored. The schemas of text files are inferred, so types that differ are *widened* to a
type that can represent both: null with any other type, integers with decimals, dates with timestamps, and JSON objects
field by field.

If a line of JSON lacks a column, the record has null there. A CSV file that lacks a column is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from flightedl.errors import DataError

_UNITS = ("s", "ms", "us", "ns")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Difference between two schemas: a clause about the second one, to be completed with the first one's file."""

    column: str
    text: str


def same_schema(first: pa.Schema, other: pa.Schema) -> Mismatch | None:
    """Compare the schemas of two files. Return None if they have the same columns."""
    mismatch = _column_mismatch(first, other)
    if mismatch is not None:
        return mismatch
    for field in first:
        found = other.field(field.name)
        if found.type != field.type:
            return Mismatch(field.name, f"column {field.name!r} is {found.type} and not {field.type}")
    return None


def widened_schema(first: pa.Schema, other: pa.Schema, *, may_lack: bool) -> pa.Schema | Mismatch:
    """Return the narrowest schema that can represent the records of both inferred schemas.

    Args:
        first: Schema that determines the order of the columns.
        other: The second inferred schema.
        may_lack: True if a column may be missing from one of them, where it is null. If False, this is an error.
    """
    if not may_lack and (mismatch := _column_mismatch(first, other)) is not None:
        return mismatch
    fields = []
    for field in first:
        number = other.get_field_index(field.name)
        kind = field.type if number < 0 else widened_type(field.type, other.field(number).type)
        if kind is None:
            found = other.field(number).type
            return Mismatch(field.name, f"column {field.name!r} is {found} and not {field.type}")
        fields.append(pa.field(field.name, kind))
    names = set(first.names)
    fields += [field for field in other if field.name not in names]
    return pa.schema(fields)


def widened_type(first: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the narrowest inferred type that can represent values of both types, or None if there is none."""
    types = pa.types
    if first == other or types.is_null(other):
        return first
    if types.is_null(first):
        return other
    kinds = (first, other)
    if all(types.is_integer(kind) or types.is_floating(kind) for kind in kinds):
        return pa.float64()
    if all(types.is_date(kind) or types.is_timestamp(kind) for kind in kinds):
        return _widened_time(first, other)
    if all(types.is_struct(kind) for kind in kinds):
        inner = widened_schema(pa.schema(list(first)), pa.schema(list(other)), may_lack=True)
        return None if isinstance(inner, Mismatch) else pa.struct(list(inner))
    if all(types.is_list(kind) for kind in kinds):
        value = widened_type(first.value_type, other.value_type)
        return None if value is None else pa.list_(value)
    return None


def require_unique_columns(schema: pa.Schema, url: str) -> None:
    """Raise DataError if two columns have the same name."""
    names = schema.names
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{url} has two columns named {twice!r}: rename one")


def schema_text(schemas: Sequence[pa.Schema]) -> str:
    """Return names and types as a string for hashing, which is the same in every version of pyarrow."""
    return "\n\n".join("\n".join(f"{field.name}\t{field.type}" for field in schema) for schema in schemas)


def _widened_time(first: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    stamps = [kind for kind in (first, other) if pa.types.is_timestamp(kind)]
    zones = {stamp.tz for stamp in stamps}
    if len(zones) > 1 or (len(stamps) == 1 and stamps[0].tz is not None):
        return None
    return pa.timestamp(max((stamp.unit for stamp in stamps), key=_UNITS.index), stamps[0].tz)


def _column_mismatch(first: pa.Schema, other: pa.Schema) -> Mismatch | None:
    known, found = set(first.names), set(other.names)
    for name in first.names:
        if name not in found:
            return Mismatch(name, f"column {name!r} is missing")
    for name in other.names:
        if name not in known:
            return Mismatch(name, f"there is an extra column {name!r}")
    return None


def is_binary(kind: pa.DataType) -> bool:
    """True for a type whose values are bytes, with offsets of any width."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
