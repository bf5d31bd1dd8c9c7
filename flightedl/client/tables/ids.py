"""Convert users' values to ids: (n,) uint64, with the bits of the integers or the hashes of the strings."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.domain.tables.placement import as_ids, ids_of_texts
from flightedl.errors import UsageError

Ids = npt.NDArray[np.uint64]


#: NumPy has a single object for each of these types, so they can be compared by identity, which is faster.
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_PLAIN_COLUMNS = (pa.Int64Array, pa.UInt64Array)
#: Arrow's types of texts.
_TEXTS = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}


class FoundIds(NamedTuple):
    """Ids of a user's value."""

    ids: Ids
    #: (n,) True for nulls, or None if there are none.
    nulls: npt.NDArray[np.bool_] | None = None
    #: (lists,) index of each list's first id, or None if the value contains no lists.
    offsets: npt.NDArray[np.int64] | None = None
    #: Shape of the value.
    shape: tuple[int, ...] = ()


def text_ids(texts: Any) -> npt.NDArray[np.int64]:
    """Return the ids of strings. An exported table has the same ids in its column ``id``.

    A string's id is the xxh3 hash (64 bits, seed 0) of its UTF-8 bytes. The string itself is not stored.

    Args:
        texts: A list, array or Arrow column of strings, without nulls.

    Raises:
        UsageError: An element is not a string.
    """
    found = texts.to_pylist() if isinstance(texts, pa.Array | pa.ChunkedArray) else list(texts)
    for text in found:
        if not isinstance(text, str | bytes):
            raise UsageError(f"text_ids takes a list of texts, but {text!r:.80} is not a text")
    return ids_of_texts(found).view(np.int64)


def plain_ids(value: Any) -> Ids | None:
    """Return an array, or a column without nulls, as ids. Return None if its elements are not 64-bit integers."""
    if type(value) is np.ndarray:
        dtype = value.dtype
        is_plain = value.ndim == 1 and (dtype is _INT64 or dtype is _UINT64) and value.flags.c_contiguous
        return value.view(_UINT64) if is_plain else None
    if isinstance(value, _PLAIN_COLUMNS) and not value.null_count:
        found: Ids = value.to_numpy().view(np.uint64)
        return found
    return None


def found_ids(table: str, value: Any) -> FoundIds:
    """Return the ids in ``value``: an array, list or Arrow column of integers or strings, or a column of such lists.

    Raises:
        UsageError: The value contains other elements. The message names the table.
    """
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if isinstance(value, pa.Array):
        return _of_arrow(table, value)
    value = bytes(value) if isinstance(value, bytearray) else value
    is_plain = isinstance(value, list | tuple | str | bytes)
    if any(isinstance(each, np.ma.MaskedArray) for each in (value if is_plain else [value])):
        raise UsageError(
            f"ids of table {table!r} are masked, which arrays cannot express: pass an Arrow column with nulls"
        )
    try:
        # As objects, elements keep their types: NumPy would convert integers next to texts, and cut off NULs.
        array = np.asarray(value, object if is_plain else None)
        return FoundIds(_of_array(table, array.reshape(-1)), shape=array.shape)
    except (TypeError, ValueError) as error:
        raise UsageError(f"ids of table {table!r} must be whole numbers or texts: {error!s:.120}") from None


def _of_array(table: str, array: npt.NDArray[Any]) -> Ids:
    if array.dtype.kind in "iu":
        return np.ascontiguousarray(as_ids(array))
    if array.size and array.dtype.kind not in "USTO":
        raise UsageError(f"ids of table {table!r} are {array.dtype}, but must be whole numbers or texts")
    elements = array.tolist()
    if all(isinstance(each, str | bytes) for each in elements):
        return ids_of_texts(elements)
    if kinds := {type(each).__name__ for each in elements if isinstance(each, str | bytes | bool | np.bool_)}:
        raise UsageError(f"ids of table {table!r} must be all numbers or all texts, but some are {', '.join(kinds)}")
    numbers = [index(each) for each in elements]
    if outside := [each for each in numbers if not -(1 << 63) <= each < 1 << 64]:
        raise UsageError(f"ids of table {table!r} have {outside[0]}, which does not fit into 64 bits")
    return np.array([each & ((1 << 64) - 1) for each in numbers], np.uint64)


def _of_arrow(table: str, column: pa.Array) -> FoundIds:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if column.null_count:
            raise UsageError(f"ids of table {table!r} have lists that are null: use empty lists for empty bags")
        found = _of_arrow(table, column.flatten())
        offsets = np.asarray(column.offsets).astype(np.int64)
        return found._replace(offsets=offsets[:-1] - offsets[0], shape=(len(column),))
    if pa.types.is_dictionary(kind):
        known = _of_arrow(table, column.dictionary)
        places = column.indices
        nulls = np.asarray(places.is_null()) if places.null_count else None
        chosen = np.asarray(places.fill_null(0) if places.null_count else places)
        ids = known.ids[chosen] if len(known.ids) else np.zeros(len(column), np.uint64)
        if known.nulls is not None:
            found = known.nulls[chosen] if nulls is None else nulls | known.nulls[chosen]
            nulls = found if found.any() else None
        return FoundIds(ids, nulls, shape=(len(column),))
    nulls = np.asarray(column.is_null()) if column.null_count else None
    if pa.types.is_integer(kind):
        filled = column.fill_null(0) if column.null_count else column
        return FoundIds(_of_array(table, filled.to_numpy(zero_copy_only=False)), nulls, shape=(len(column),))
    if str(kind) in _TEXTS:
        # Equal strings are hashed only once. Arrow cannot encode views.
        encoded = column.cast(pa.large_binary()).dictionary_encode()
        texts = ids_of_texts(encoded.dictionary.to_pylist())
        chosen = np.asarray(encoded.indices.fill_null(0))
        ids = texts[chosen] if len(texts) else np.zeros(len(column), np.uint64)
        return FoundIds(ids, nulls, shape=(len(column),))
    raise UsageError(f"ids of table {table!r} are {kind}, but must be whole numbers or texts")
