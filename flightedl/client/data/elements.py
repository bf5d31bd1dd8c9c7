"""Batches of elements of a map-style dataset. The script's function ``get`` returns the elements by index.

``ByIndex`` is a transform from batches of indices to batches of elements. Like any transform, it runs in the reader
thread or in reader processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from flightedl.errors import DataError
from flightedl.formats.reader import as_batch

_SHOWN = 8


class ByIndex:
    """Transform from indices to elements.

    Args:
        get: Returns the element of an index, or the elements of a list of indices.
        is_batched: True if ``get`` takes a list of indices.
        columns: Names of the parts of an element that is a tuple, or name of its only part.
        first: An index that ``get`` accepts.
    """

    def __init__(self, get: Callable[[Any], Any], is_batched: bool, columns: Sequence[str], first: int) -> None:
        self.get = get
        self.is_batched = is_batched
        self.columns = tuple(columns)
        self.first = first
        #: Empty batch with the elements' columns; None until a batch has been read.
        self._none: pa.RecordBatch | None = None

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the elements with these indices.

        Raises:
            DataError: the elements do not form columns.
            Exception: the exception of ``get``, with a note that names the index.
        """
        indices: list[int] = batch.column(0).to_pylist()
        if not indices and self._none is not None:
            return self._none
        # The columns are unknown until the first element has been read.
        found = self._elements(indices or [self.first])
        self._none = found.slice(0, 0)
        return found if indices else self._none

    def _elements(self, indices: list[int]) -> pa.RecordBatch:
        if not self.is_batched:
            return self._joined(indices, [_noted(self.get, index, f"at index {index}") for index in indices])
        shown = ", ".join(map(str, indices[:_SHOWN])) + (", ..." if len(indices) > _SHOWN else "")
        found = _noted(self.get, indices, f"at the indices {shown}")
        if isinstance(found, pa.Table):
            found = as_batch(found)
        if isinstance(found, Mapping):
            found = _record_batch({str(name): _column(str(name), values) for name, values in found.items()})
        elif not isinstance(found, pa.RecordBatch):
            found = self._joined(indices, list(found))
        if found.num_rows != len(indices):
            raise DataError(f"it returned {found.num_rows} elements for {len(indices)} indices")
        return found

    def _joined(self, indices: list[int], elements: list[Any]) -> pa.RecordBatch:
        rows = [self._parts(element) for element in elements]
        names = list(rows[0]) if rows else []
        for index, row in zip(indices, rows, strict=False):
            if list(row) != names:
                raise DataError(
                    f"the element at index {index} has the columns {_shown(row)}, and others {_shown(names)}"
                )
        return _record_batch({name: _column(name, [row[name] for row in rows]) for name in names})

    def _parts(self, element: Any) -> dict[str, Any]:
        if isinstance(element, Mapping):
            if self.columns:
                raise DataError("an element is a dict, whose keys are the column names: leave out columns=")
            return {str(name): value for name, value in element.items()}
        parts = element if isinstance(element, tuple | list) else (element,)
        names = self.columns or tuple(map(str, range(len(parts))))
        if len(parts) != len(names):
            raise DataError(f"an element has {len(parts)} parts, and columns= names {len(names)}")
        return dict(zip(names, parts, strict=True))


def _noted(get: Callable[[Any], Any], argument: Any, note: str) -> Any:
    try:
        return get(argument)
    except Exception as error:
        error.add_note(note)
        raise


def _record_batch(columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    if not columns:
        raise DataError("an element has no parts: return numbers, text, bytes or arrays")
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _column(name: str, values: Any) -> pa.Array:
    try:
        return _built(values)
    except (pa.ArrowException, TypeError, ValueError, RuntimeError) as error:
        kinds = ", ".join(sorted({_kind(value) for value in islice(values, 1000)}))
        raise DataError(f"column {name!r:.80} has values that do not form one ({kinds:.200}): {error!s:.200}") from None


def _built(values: Any) -> pa.Array:
    """Return one column with the values of all elements. Arrays and tensors must have the same shape."""
    if hasattr(values, "__array__"):
        stacked = np.asarray(values)
    elif len(values) and _is_array(values[0]):
        stacked = np.stack([np.asarray(value) for value in values])
    else:
        return pa.array(values)
    if stacked.ndim > 1 and stacked.dtype != np.bool_:
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(stacked))
    # Arrow stores booleans as bits, so a tensor cannot share their memory.
    column = pa.array(stacked.ravel())
    for size in reversed(stacked.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "__array_interface__")


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def _shown(names: Any) -> str:
    return ", ".join(islice(names, _SHOWN))
