"""The common schema of a dataset's files.

Files must have the same columns, in any order. The same values may have different physical types in different files, so
the type of a column is computed from all schemas, whatever their order, and never from values: the widest integer, the
finest unit of time, plain columns instead of dictionaries, views and run-ends, and small instead of large offsets.
Nullability and metadata are ignored. The null type goes with any other. Integers and floating-point numbers go together
if every integer of the type is exact, so neither int64 goes with double, nor uint64 with signed integers.

The schemas of text files are inferred (see ``inference``). A text column goes with a stored column if its values have a
form of the stored type. If a line of JSON lacks a column, the record has null there. A CSV file that lacks a column is
an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from flightedl.errors import DataError
from flightedl.formats.inference import MixedTypesError, candidates, is_guess, joined_guesses

#: Floating-point types by the number of bits of the integers that they represent exactly.
_FLOATS = ((11, pa.float16()), (24, pa.float32()), (53, pa.float64()))


def type_mismatch(schema: pa.Schema, other: pa.Schema) -> str:
    """Compare another file's types with a dataset's. Return an empty text if these represent its values."""
    for field in other:
        known = schema.field(field.name).type
        if common_field([schema.field(field.name), field]) != known:
            return f"column {field.name!r} is {field.type} and not {known}"
    return ""


def common_field(fields: Sequence[pa.Field]) -> pa.DataType | None:
    """Return the type that represents a column's values in all files, or None if there is none."""
    guess = pa.field("", pa.null())
    try:
        for field in filter(is_guess, fields):
            guess = joined_guesses(guess, field)
    except MixedTypesError:
        return None
    stored = [field.type for field in fields if not is_guess(field)]
    kind = common_type(stored)
    if kind is None or not is_guess(guess):
        return kind
    if not any(not pa.types.is_null(each) for each in stored):
        return common_type([guess.type])
    if pa.types.is_struct(kind) and pa.types.is_struct(guess.type):
        return _common_object(kind, guess.type)
    if pa.types.is_list(kind) and pa.types.is_list(guess.type):
        item = common_field([kind.value_field, guess.type.value_field])
        return None if item is None else pa.list_(item)
    return next((found for each in candidates(guess) if (found := common_type([kind, each])) is not None), None)


def _common_object(kind: pa.StructType, guess: pa.StructType) -> pa.DataType | None:
    """Return the type of stored structs and objects in JSON. A field may be missing from either, where it is null."""
    inner = {field.name: field.type for field in kind}
    for field in guess:
        known = [pa.field(field.name, inner[field.name])] if field.name in inner else []
        inner[field.name] = common_field([*known, field])
    return None if None in inner.values() else pa.struct(list(inner.items()))


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the types of batches of records with this schema, without metadata."""
    return pa.schema([(field.name, common_type([field.type]) or field.type) for field in schema])


def common_type(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """Return the type that represents the values of all these types, whatever their order, or None."""
    found = list(dict.fromkeys(kind for kind in map(_plain, kinds) if not pa.types.is_null(kind)))
    if len(found) > 1:
        found = list(dict.fromkeys(_plain(getattr(kind, "storage_type", kind)) for kind in found))
    if not found:
        return pa.null()
    for is_of_family, common in _FAMILIES:
        if all(map(is_of_family, found)):
            return common(found)
    return found[0] if len(found) == 1 else None


def _common_list(found: Sequence[Any]) -> pa.DataType | None:
    inner = common_type([kind.value_type for kind in found])
    sizes = {kind.list_size if pa.types.is_fixed_size_list(kind) else -1 for kind in found}
    return None if inner is None else pa.list_(inner, sizes.pop() if len(sizes) == 1 else -1)


def _common_map(found: Sequence[Any]) -> pa.DataType | None:
    key, item = (common_type([getattr(kind, part) for kind in found]) for part in ("key_type", "item_type"))
    return None if key is None or item is None else pa.map_(key, item)


def _common_struct(found: Sequence[Any]) -> pa.DataType | None:
    names = [field.name for field in found[0]]
    if any(sorted(field.name for field in kind) != sorted(names) for kind in found) or len(set(names)) != len(names):
        return found[0] if len(found) == 1 else None
    inner = [common_type([kind.field(name).type for kind in found]) for name in names]
    return None if None in inner else pa.struct(list(zip(names, inner, strict=True)))


def _common_number(found: Sequence[pa.DataType]) -> pa.DataType | None:
    signed = [kind.bit_width for kind in found if pa.types.is_signed_integer(kind)]
    unsigned = [kind.bit_width for kind in found if pa.types.is_unsigned_integer(kind)]
    floats = [kind.bit_width for kind in found if pa.types.is_floating(kind)]
    if floats:
        needed = max([*(bits - 1 for bits in signed), *unsigned, 0])
        return next((kind for bits, kind in _FLOATS if bits >= needed and kind.bit_width >= max(floats)), None)
    return None if signed and 64 in unsigned else _unified(found)


def _common_stamp(found: Sequence[Any]) -> pa.DataType | None:
    zones = {kind.tz for kind in found} - {None}
    return _unified([pa.timestamp(kind.unit, kind.tz and "UTC") for kind in found] if len(zones) > 1 else found)


def _unified(found: Sequence[pa.DataType]) -> pa.DataType | None:
    """Return the widest type or finest unit of types of one family, or None if there is none."""
    schemas = [pa.schema([("", kind)]) for kind in found]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type without dictionary, run-ends, view and large offsets at its top level."""
    types: Any = pa.types
    while types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        kind = kind.value_type
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    return pa.binary() if types.is_large_binary(kind) or types.is_binary_view(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    types: Any = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)) or bool(
        types.is_list_view(kind) or types.is_large_list_view(kind)
    )


def is_binary(kind: pa.DataType) -> bool:
    """True for a type whose values are bytes, with offsets of any width."""
    return bool(pa.types.is_binary(_plain(kind)) or pa.types.is_fixed_size_binary(kind))


def is_number(kind: pa.DataType) -> bool:
    """True for integers and floating-point numbers."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


#: Test for a family of types without dictionaries and the like -> common type of some of the family.
_FAMILIES: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Sequence[Any]], pa.DataType | None]], ...] = (
    (pa.types.is_string, lambda _: pa.string()),
    (is_binary, _unified),
    (_is_list, _common_list),
    (pa.types.is_struct, _common_struct),
    (pa.types.is_map, _common_map),
    (is_number, _common_number),
    (pa.types.is_decimal, _unified),
    (pa.types.is_date, _unified),
    (pa.types.is_time, _unified),
    (pa.types.is_timestamp, _common_stamp),
    (pa.types.is_duration, _unified),
)


def large_type(kind: pa.DataType) -> pa.DataType:
    """Return the type with large offsets, which a column with more than 2 GiB of values needs while it is read."""
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.large_list(large_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, large_type(field.type)) for field in kind])
    return kind


def require_unique_columns(names: Sequence[str], url: str) -> None:
    """Raise DataError if two columns have the same name."""
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{url} has two columns named {twice!r}: rename one")


def schema_text(schema: pa.Schema) -> str:
    """Return names and types as a string for hashing, which is the same in every version of pyarrow."""
    return "\n".join(f"{field.name}\t{field.type}" for field in schema)


def column_mismatch(first: pa.Schema, other: pa.Schema, *, may_lack: bool = False) -> str:
    """Compare the names of columns. With ``may_lack``, the second schema may lack columns of the first.

    Return a clause about the second schema, or an empty text if the names are equal.
    """
    known, found = set(first.names), set(other.names)
    if not may_lack and (missing := [name for name in first.names if name not in found]):
        return f"column {missing[0]!r} is missing"
    extra = [name for name in other.names if name not in known]
    return f"there is an extra column {extra[0]!r}" if extra else ""
