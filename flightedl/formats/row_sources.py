"""Rows of a table in files of other programs, with the columns of ``table_files``. All rows are read into memory.

* any format of datasets; columns ``0``, ``1``, … may replace ``values``
* ``numpy``: arrays with these names, and ``ids`` for ``id``, in an npz file or in the npy files of a directory
* ``text``: lines of an id and its values, separated by tabs, commas or spaces. A first line of two counts is skipped.
"""

from __future__ import annotations

import io
from itertools import count, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc

from flightedl.domain.tables.placement import Ids
from flightedl.domain.tables.spec import TableSpec, have_room
from flightedl.errors import DataError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.index import build_index
from flightedl.formats.reader import ChunkReader
from flightedl.formats.sources import opened, parsing, reason
from flightedl.formats.table_files import FileRows, file_rows, is_list, require_rows
from flightedl.ports import Files

_ROWS_AT_ONCE = 1 << 16
#: Limit of two lines of text, each of which has at most 16,384 values.
_LONGEST_BYTES = 1 << 20


def row_table(files: Files, spec: DatasetSpec) -> pa.Table:
    """Return the content of files. Raises DataError if they do not exist or cannot be read."""
    if spec.format == "numpy":
        is_archive = spec.urls[0].endswith(".npz")
        found = files.expand([spec.urls[0] if is_archive else f"{spec.urls[0]}/*.npy"])
        arrays = [each for stat in found for each in _arrays(files, stat.url)]
        if len({len(array) for _, array in arrays}) > 1:
            shown = ", ".join(f"{name} of {len(array)}" for name, array in arrays)
            raise DataError(f"{found[0].url}: each array must have one row per id, but there are {shown}")
        return pa.table({"id" if name == "ids" else name: array for name, array in arrays})
    if spec.format == "text":
        return pa.concat_tables([_text(files, stat.url, dict(spec.types)) for stat in files.expand(list(spec.urls))])
    index = build_index(files, spec)
    chunks = [index.chunk(number) for number in range(len(index))]
    return _joined(ChunkReader(files, chunks, spec, index.schema).load()[0])


def _joined(table: pa.Table) -> pa.Table:
    """Replace the columns ``0``, ``1``, … by ``values``."""
    numbers = list(takewhile(table.schema.names.__contains__, map(str, count())))
    if "values" in table.schema.names or not numbers:
        return table
    matrix = np.stack([table.column(name).to_numpy() for name in numbers], axis=1)
    return table.drop_columns(numbers).append_column("values", _column(matrix))


def _column(array: npt.NDArray[Any]) -> pa.Array:
    if array.ndim != 2:
        return pa.array(array.tolist() if array.dtype.kind in "US" else array)
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(array).reshape(-1)), array.shape[1])


def _arrays(files: Files, url: str) -> list[tuple[str, pa.Array]]:
    with opened(files, url) as source, parsing(source, "its arrays"):
        loaded: Any = np.load(io.BytesIO(source.read()), allow_pickle=False)
        named = loaded if url.endswith(".npz") else {url.rpartition("/")[2].removesuffix(".npy"): loaded}
        return [(name, _column(array)) for name, array in named.items()]


def _text(files: Files, url: str, types: dict[str, str]) -> pa.Table:
    with opened(files, url) as source, parsing(source, "its lines"):
        text = source.read()
        first, second = (text[:_LONGEST_BYTES] + b"\n\n").replace(b"\r", b"").split(b"\n", 2)[:2]
        is_header = [count.isdigit() for count in first.split()] == [True, True] and len(second.split()) != 2
        line = second if is_header else first
        delimiter = next((each for each in "\t," if each.encode() in line), " ")
        fields = line.split(delimiter.encode())
        numbers = [str(number) for number in range(len(fields) - 1 - (not fields[-1]))]
        id_type = types.get("id", "int64" if fields[0].lstrip(b"-").isdigit() else "binary")
        columns = {"id": id_type, **dict.fromkeys(numbers, "float32")}
        splitting = pc.ParseOptions(delimiter=delimiter, quote_char=False)
        reading = pc.ReadOptions(skip_rows=int(is_header), column_names=[*columns, "end"][: len(fields)])
        converting = pc.ConvertOptions(column_types=columns, include_columns=[*columns], null_values=[])
        try:
            parsed = pc.read_csv(pa.py_buffer(text), reading, splitting, converting)
        except pa.ArrowInvalid as error:
            hint = "the type of ids is set by --types id=string or id=uint64"
            raise DataError(f"{url} has a line of another form: {reason(error)}; {hint}") from None
        return _joined(parsed)


def rows_of(
    url: str, table: pa.Table, spec: TableSpec, existing: Ids, *, has_slots: bool, keeps_existing: bool
) -> tuple[list[FileRows], dict[str, int]]:
    """Return the rows to import, given the ids of the table's rows, and the numbers of rows by what becomes of them.

    Raises:
        DataError: the rows do not belong to this table or its optimizer, or several of them have the same id.
    """
    require_rows(url, table.schema, spec)
    found = set(table.schema.names) - {"id", "values"} if has_slots else set()
    state = {"updates": False, **{slot.name: slot.per_element for slot in spec.optimizer.slots}}
    rule = f"the state of {type(spec.optimizer).__name__} is {', '.join(state)}: correct it, or add --no-slots"
    for name in sorted(found ^ state.keys()) if found else ():
        raise DataError(f"{url} has {'an unknown' if name in found else 'no'} column {name!r}, but {rule}")
    if wrong := [name for name in sorted(found) if is_list(table.schema.field(name).type) != state[name]]:
        raise DataError(f"{url} has {table.schema.field(wrong[0]).type} in the column {wrong[0]!r}, but {rule}")
    slots = [slot.name for slot in spec.optimizer.slots] if found else None
    batches = table.select(["id", "values", *sorted(found)]).to_batches(_ROWS_AT_ONCE)
    try:
        rows = [file_rows(url, batch, spec, slots) for batch in batches]
    except (pa.ArrowException, ValueError) as error:
        raise DataError(
            f"{url} has other values than numbers, or updates that are no counts: {reason(error)}"
        ) from None
    ids = np.concatenate([existing[:0], *(some.ids for some in rows)])
    ordered = np.sort(ids)
    if (repeated := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        names = table.column("id").filter(pa.array(np.isin(ids, repeated[:3]))).unique().to_pylist()
        raise DataError(f"{url} has several rows of the same id, for example of {names}: keep one row of each id")
    is_known = np.isin(ids, existing, assume_unique=True)
    is_chosen = is_known.copy()
    is_chosen[~is_known] = have_room(spec, ids[~is_known], existing)
    known, full = int(is_known.sum()), int(np.count_nonzero(~is_chosen))
    is_chosen[is_known] = not keeps_existing
    masks = np.split(is_chosen, np.cumsum([len(some.ids) for some in rows]))
    chosen = [some.chosen(mask) for some, mask in zip(rows, masks, strict=False)]
    skipped = {"skipped_existing": known * keeps_existing, "skipped_full": full}
    return chosen, {"imported": int(is_chosen.sum()), "replaced": known * (not keeps_existing), **skipped}
