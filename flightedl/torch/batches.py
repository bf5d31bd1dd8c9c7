"""The job's batches as tensors, without a copy where Arrow permits this.

The tensor of a numeric column without nulls shares the column's memory. It is read-only unless it is a copy
(``copy=True``), because a batch whose gradient arrived too late is yielded again, and must not have changed. Writes to
a read-only tensor are detected and raise an error.

A batch is *current* from the time it is yielded until the next one is requested, and a step pushes with its identity.
So batches must not be requested before the step (``ahead``). Worker processes of a ``DataLoader`` are rejected; the
dataset itself reads ahead.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch.utils import data as torch_data

from flightedl.errors import UsageError
from flightedl.torch.ahead import handed_out

Tensors = Any


class Batches(Protocol):
    """Interface of the dataset that ``job.dataset`` returns."""

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...


def batches(
    dataset: Batches,
    *columns: str,
    transform: Callable[[pa.RecordBatch], Tensors] | None = None,
    copy: bool = False,
    pin_memory: bool = False,
    device: str | torch.device | None = None,
    fill: Mapping[str, float] | None = None,
) -> Iterator[Tensors]:
    """Yield this trainer's batches as tensors.

    Args:
        dataset: The result of ``job.dataset``.
        columns: Columns to convert: one name yields a tensor, several names a tuple, no name a dict of all columns.
        transform: Converts a ``pyarrow.RecordBatch`` to tensors, in any structure. Replaces ``columns``.
        copy: True to copy the data, so that the tensors are writable.
        pin_memory: True to copy the data to pinned memory, from which accelerators copy faster.
        device: Device to which the data is copied.
        fill: Number to use in place of nulls, by the column's name or a pattern, such as ``{"I*": 0}``. The first
            pattern that matches counts. A column of the type null gets the type of the number.

    Yields:
        Tensors of shape (records, ...) with the type of their column. Lists of equal length become further dimensions.

    Raises:
        UsageError: a column is not numeric or has nulls, ``fill`` does not fit, or a tensor was written to.
    """
    if transform is not None and (columns or fill or not callable(transform)):
        raise UsageError("give either the names of columns, or a transform (without fill=), which must be a function")
    for wrong in (name for name in columns if not isinstance(name, str)):
        raise UsageError(f"a column is {wrong!r:.80}, but must be a name, as in batches(data, 'pixels', 'label')")
    if not isinstance(fill or {}, Mapping):
        raise UsageError(f'fill is {fill!r:.80}, but must be numbers by column, such as {{"I*": 0}}')
    filled = (_filled(batch, fill) for batch in dataset) if fill else dataset
    return _batches(filled, columns, transform, copy, _Move(pin_memory, device))


def _batches(
    dataset: Batches,
    columns: Sequence[str],
    transform: Callable[[pa.RecordBatch], Tensors] | None,
    copy: bool,
    move: _Move,
) -> Iterator[Tensors]:
    for batch in dataset:
        made, shared = _tensors_of(batch, columns, transform, copy, move)
        handed_out(made)
        yield made
        # Do not keep a reference to the tensor here, or else ``ahead`` would consider it in use.
        del made
        _require_unwritten(shared)


def _tensors_of(
    batch: pa.RecordBatch,
    columns: Sequence[str],
    transform: Callable[[pa.RecordBatch], Tensors] | None,
    copy: bool,
    move: _Move,
) -> tuple[Tensors, dict[str, tuple[torch.Tensor, int]]]:
    """Return the user's tensors; and, by column, the read-only tensors with their write counters."""
    if transform is not None:
        return move.all_of(transform(batch)), {}
    _require_columns(columns, batch.schema)
    tensors = {name: tensor_of_column(name, batch.column(name)) for name in columns or batch.schema.names}
    shared = {} if copy else {name: (tensor, tensor._version) for name, tensor in tensors.items()}
    if copy:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    found = {name: move.one(tensor) for name, tensor in tensors.items()}
    match len(columns):
        case 0:
            return found, shared
        case 1:
            return found[columns[0]], shared
        case _:
            return tuple(found[name] for name in columns), shared


def _require_unwritten(shared: dict[str, tuple[torch.Tensor, int]]) -> None:
    for name, (tensor, version) in shared.items():
        if tensor._version != version:
            raise UsageError(
                f"the tensor of column {name!r} was written to, but shares the dataset's memory: use copy=True, or "
                "write to a copy"
            )
    shared.clear()


class IterableDataset(torch_data.IterableDataset[Tensors]):
    """Batches as from ``batches``, for ``DataLoader(IterableDataset(data, "x", "y"), batch_size=None)``.

    The loader must run in the session's process (``num_workers=0``). It may pin memory.

    Args:
        dataset: The result of ``job.dataset``.
        columns: As in ``batches``.
        more: Other arguments of ``batches``.
    """

    def __init__(self, dataset: Batches, *columns: str, **more: Any) -> None:
        self._dataset, self._columns, self._more = dataset, columns, more

    def __iter__(self) -> Iterator[Tensors]:
        if torch_data.get_worker_info() is not None:
            raise UsageError(_WORKERS)
        return batches(self._dataset, *self._columns, **self._more)

    def __reduce__(self) -> Any:
        raise UsageError(_WORKERS)


_WORKERS = (
    "worker processes of a DataLoader cannot read a job's data, because the session belongs to the process that trains "
    "and its connections do not survive a fork: use num_workers=0; the dataset itself reads ahead, and if preparing "
    "batches takes too long, start more trainers"
)


class _Move:
    """Moves tensors to pinned memory or to a device."""

    def __init__(self, pin_memory: bool, device: str | torch.device | None) -> None:
        self._pin = pin_memory
        self._device = None if device is None else torch.device(device)

    def one(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._pin and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor if self._device is None else tensor.to(self._device, non_blocking=self._pin)

    def all_of(self, found: Tensors) -> Tensors:
        if isinstance(found, torch.Tensor):
            return self.one(found)
        if isinstance(found, dict):
            return {key: self.all_of(value) for key, value in found.items()}
        if isinstance(found, tuple) and hasattr(found, "_fields"):
            return type(found)(*map(self.all_of, found))
        if isinstance(found, list | tuple):
            return type(found)(map(self.all_of, found))
        return found


def _require_columns(columns: Iterable[str], schema: pa.Schema) -> None:
    for name in columns:
        if name not in schema.names:
            raise UsageError(f"there is no column {name!r:.80}; the data has {', '.join(schema.names):.200}")


def _filled(batch: pa.RecordBatch, fill: Mapping[str, float]) -> pa.RecordBatch:
    for pattern in fill:
        if not fnmatch.filter(batch.schema.names, pattern):
            raise UsageError(
                f"fill has {pattern!r:.80}, which is none of the columns {', '.join(batch.schema.names):.200}"
            )
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = next((value for pattern, value in fill.items() if fnmatch.fnmatchcase(name, pattern)), None)
        try:
            columns[name] = column if value is None else _without_nulls(column, value)
        except (pa.ArrowException, TypeError):
            raise UsageError(f"fill has {value!r:.80} for column {name!r:.80}, which is {column.type}") from None
    return pa.record_batch(columns)


def _without_nulls(column: pa.Array, value: float) -> pa.Array:
    """Return the column with the value in place of nulls, also inside of lists. Lists that are null remain."""
    kind = column.type
    if pa.types.is_list(kind) and not column.null_count and column.flatten().null_count:
        offsets = np.asarray(column.offsets) - column.offsets[0].as_py()
        return pa.ListArray.from_arrays(pa.array(offsets), _without_nulls(column.flatten(), value))
    if pa.types.is_fixed_size_list(kind) and not column.null_count:
        return pa.FixedSizeListArray.from_arrays(_without_nulls(column.flatten(), value), kind.list_size)
    if pa.types.is_null(kind):
        return pa.array([value] * len(column))
    return column.fill_null(pa.scalar(value).cast(kind)) if column.null_count else column


def tensor_of_column(name: str, column: pa.Array) -> torch.Tensor:
    """Return a tensor (records, ...) that shares the column's memory. Booleans, stored as bits in Arrow, are copied.

    Raises:
        UsageError: the column contains nulls, lists of different lengths, or elements that are not numbers.
    """
    kind = column.type
    shape: list[int] = [len(column)]
    if isinstance(kind, pa.FixedShapeTensorType):
        return torch.from_dlpack(_flat(name, column.storage)).reshape(len(column), *column.to_numpy_ndarray().shape[1:])
    while (
        pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    ):
        _require_no_nulls(name, column)
        shape.append(_length_of_lists(name, column))
        column = column.flatten()
    _require_no_nulls(name, column)
    if pa.types.is_boolean(column.type):
        flat = torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False), dtype=np.bool_))
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        flat = torch.from_dlpack(column)
    else:
        raise UsageError(
            f"column {name!r} has type {kind}, which is not numeric: omit it, or convert it with transform="
        )
    return flat.reshape(shape)


def _flat(name: str, column: pa.Array) -> pa.Array:
    _require_no_nulls(name, column)
    return column.flatten()


def _require_no_nulls(name: str, column: pa.Array) -> None:
    if column.null_count:
        raise UsageError(
            f"column {name!r} has {column.null_count} nulls in this batch, and tensors cannot have any: exclude such "
            f"records with filter= of job.dataset, or replace nulls with fill={{{name!r}: 0}} of fe.torch.batches"
        )


def _length_of_lists(name: str, column: pa.Array) -> int:
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    lengths = np.diff(column.offsets.to_numpy())
    if len(lengths) and (lengths != lengths[0]).any():
        raise UsageError(
            f"column {name!r} has lists of {lengths.min()} to {lengths.max()} elements: pad them with transform="
        )
    return int(lengths[0]) if len(lengths) else 0
