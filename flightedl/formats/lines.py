"""Lines, each of which is a record, and two formats of sparse data in lines. Empty lines are skipped.

* ``lines``: the bytes of each line without its end, in a column ``record``, which ``decode`` converts to columns
* ``svmlight``: lines such as ``1 qid:3 7:0.5 9:1 # comment``, as ``label``, ``qid``, and lists ``indices``, ``values``
* ``slots``: lines such as ``1 6001:17 6001:4 6002:9``, as ``label`` and a list for each slot, empty where it is missing

Lines end with a newline, which a carriage return may precede. Arrow parses all lines of a text together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.errors import DataError, UsageError
from flightedl.formats.chunks import FileIndex, IndexOptions, TextOptions
from flightedl.formats.cutting import Readable, line_end
from flightedl.formats.inference import FORMS, compute, guess_of_texts
from flightedl.formats.recordio import SCHEMA, bytes_of
from flightedl.formats.records import ReadRequest, first_misfit
from flightedl.formats.schemas import plain_schema
from flightedl.formats.text import MARK, TextFormat
from flightedl.ports import Files, FileStat

Places = npt.NDArray[np.int64]
Names = tuple[str, ...] | None
_MOST_SLOTS = 10_000


class Lines(TextFormat):
    """See ``formats.Format``."""

    name: ClassVar[str] = "lines"
    suffixes: ClassVar[tuple[str, ...]] = (".lines",)
    may_lack_columns: ClassVar[bool] = False
    is_utf8: ClassVar[bool] = False

    def head(self, source: Readable, url: str, options: TextOptions) -> tuple[Names, bytes, bytes]:  # noqa: ARG002
        # Elsewhere than at the beginning of the file, these bytes belong to a record.
        start = source.read(len(MARK))
        return (None, MARK, b"") if start == MARK else (None, b"", start)

    def records_end(self, text: bytes, options: TextOptions) -> int:  # noqa: ARG002 - as TextFormat does
        return line_end(text)

    def record_ends(self, text: bytes, options: TextOptions) -> Places:  # noqa: ARG002 - as TextFormat does
        lines = text.split(b"\n")
        ends = np.minimum(np.cumsum([len(line) + 1 for line in lines]), len(text))
        return np.asarray(ends[[line not in (b"", b"\r") for line in lines]], np.int64)

    def guess(self, text: bytes, names: Names, options: IndexOptions) -> tuple[int, pa.Schema]:  # noqa: ARG002
        return len(_lines(text)), SCHEMA

    def require_declared(self, *_: Any) -> None:
        """Types are those of the columns that ``decode`` makes."""

    def parse(self, text: Any, names: Names, request: ReadRequest) -> pa.Table:  # noqa: ARG002
        return pa.table([pa.array(_lines(text), pa.binary())], schema=SCHEMA)

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:
        if len(schema) != 1:
            raise UsageError(f"lines hold one column of bytes or text, and this has {', '.join(schema.names)[:200]}")
        for batch in batches:
            records = bytes_of(batch.column(0))
            if any(not record or b"\n" in record or record.endswith(b"\r") for record in records):
                raise DataError("a record is empty or contains the end of a line, so it cannot be a line")
            yield b"".join(record + b"\n" for record in records)


class _Sparse(NamedTuple):
    """Lines that consist of a label and pairs ``key:value``. ``size`` is their number."""

    size: int
    #: Record of each label, and the labels.
    labeled: Places
    labels: pa.StringArray
    #: Record of each pair, and their keys and values.
    owners: Places
    keys: pa.StringArray
    values: pa.StringArray

    def label(self) -> pa.Array:
        """Return the label of each record as text, null if it is missing."""
        places = np.full(self.size, -1)
        places[self.labeled] = np.arange(len(self.labeled))
        return self.labels.take(pa.array(places, mask=places < 0))

    def pairs(self, chosen: Places) -> _Sparse:
        """Return only some of the pairs."""
        wanted = pa.array(chosen)
        return self._replace(owners=self.owners[chosen], keys=self.keys.take(wanted), values=self.values.take(wanted))

    def list_of(self, texts: pa.StringArray, kind: pa.DataType, what: str) -> pa.Array:
        """Return a list of each record's keys or values."""
        offsets = np.append(0, np.cumsum(np.bincount(self.owners, minlength=self.size)))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _cast(texts, kind, self.owners, what))


class Svmlight(Lines):
    """See ``formats.Format``."""

    name: ClassVar[str] = "svmlight"
    suffixes: ClassVar[tuple[str, ...]] = (".svmlight", ".libsvm", ".svm")
    may_lack_columns: ClassVar[bool] = True
    is_utf8: ClassVar[bool] = True
    require_declared: Any = TextFormat.require_declared

    def __call__(self, line: bytes) -> dict[str, Any]:
        """Return the columns of one record. Raises ValueError if the line has another form."""
        records: list[dict[str, Any]] = self.table_of([line], IndexOptions()).to_pylist()
        return records[0]

    def table_of(self, lines: Sequence[bytes], options: IndexOptions) -> pa.Table:
        """Return the columns of several records, which is much faster than one at a time. Raises the same error."""
        text = b"\n".join(lines)
        _, schema = self.guess(text, None, options)
        found = self.parse(text, None, ReadRequest(plain_schema(schema)))
        if len(found) != len(lines):
            raise ValueError(f"{len(lines)} records have {len(found)} lines that are not empty")
        return found

    def guess(self, text: bytes, names: Names, options: IndexOptions) -> tuple[int, pa.Schema]:
        table = self.parse(text, names, ReadRequest(pa.schema([])))
        declared = options.declared
        return len(table), pa.schema([field.with_type(declared.get(field.name, field.type)) for field in table.schema])

    def parse(self, text: Any, names: Names, request: ReadRequest) -> pa.Table:  # noqa: ARG002
        found = _sparse(text, has_comments=True)
        every = np.arange(found.size)
        if len(missing := np.setdiff1d(every, found.labeled)):
            raise ValueError(f"its record {missing[0] + 1} has no label")
        columns = {"label": _cast(compute().ascii_ltrim(found.labels, "+"), pa.float64(), every, "a label")}
        is_query = np.asarray(compute().equal(found.keys, "qid").cast(pa.uint8())) > 0
        if is_query.any():
            queries = found.pairs(np.flatnonzero(is_query))
            queries = queries._replace(labeled=queries.owners, labels=queries.values)
            columns["qid"] = _cast(queries.label(), pa.int64(), every, "a query")
            found = found.pairs(np.flatnonzero(~is_query))
        columns["indices"] = found.list_of(found.keys, pa.int64(), "an index")
        columns["values"] = found.list_of(found.values, pa.float64(), "a value")
        types = {name: request.schema.field(name).type for name in columns if name in request.schema.names}
        return pa.table({name: column.cast(types.get(name, column.type)) for name, column in columns.items()})

    def write(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[bytes]:  # noqa: ARG002
        raise UsageError(f"{self.name} can only be read: write another format, such as parquet")


class Slots(Svmlight):
    """See ``formats.Format``."""

    name: ClassVar[str] = "slots"
    suffixes: ClassVar[tuple[str, ...]] = (".slots",)

    def index(self, files: Files, stat: FileStat, options: IndexOptions) -> FileIndex:
        found = super().index(files, stat, options)
        if len(found.schema) > _MOST_SLOTS:
            raise DataError(f"{stat.url} has more than {_MOST_SLOTS:,} slots, which is the limit: is it svmlight?")
        return found

    def guess(self, text: bytes, names: Names, options: IndexOptions) -> tuple[int, pa.Schema]:  # noqa: ARG002
        found = _sparse(text)
        fields = [guess_of_texts("label", pa.chunked_array([found.labels]))] if len(found.labels) else []
        for slot, pairs in _by_slot(found).items():
            item = guess_of_texts("item", pa.chunked_array([pairs.values]))
            fields.append(pa.field(slot, pa.list_(item), metadata={FORMS: b""}))
        declared = options.declared
        return found.size, pa.schema([pa.field(f.name, declared[f.name]) if f.name in declared else f for f in fields])

    def parse(self, text: Any, names: Names, request: ReadRequest) -> pa.Table:  # noqa: ARG002
        found = _sparse(text)
        slots, none = _by_slot(found), found.pairs(np.zeros(0, np.int64))
        columns, needed = {}, request.needed()
        for field in request.schema:
            if pa.types.is_list(field.type) and (needed is None or field.name in needed):
                pairs = slots.get(field.name, none)
                columns[field.name] = pairs.list_of(pairs.values, field.type.value_type, f"{field.name!r:.80}")
            elif needed is None or field.name in needed:
                columns[field.name] = _cast(found.label(), field.type, np.arange(found.size), "a label")
        return pa.table(columns)


def _lines(text: Any) -> list[bytes]:
    return [line for part in bytes(text).split(b"\n") if (line := part.removesuffix(b"\r"))]


def _sparse(text: Any, *, has_comments: bool = False) -> _Sparse:
    arrow = compute()
    lines = pa.array(_lines(text), pa.string())
    if has_comments and b"#" in bytes(text):
        lines = arrow.replace_substring_regex(lines, "#.*", "")
    tokens = arrow.ascii_split_whitespace(arrow.ascii_trim_whitespace(lines))
    tokens = tokens.filter(arrow.not_equal(arrow.ascii_trim_whitespace(lines), ""))
    owners, texts = np.asarray(tokens.value_parent_indices()), tokens.flatten()
    parts = arrow.split_pattern(texts, ":", max_splits=1)
    is_pair = np.diff(np.asarray(parts.offsets)) > 1
    labels = np.flatnonzero(~is_pair)
    if len(wrong := np.setdiff1d(labels, np.asarray(tokens.offsets))):
        shown = texts[int(wrong[0])].as_py()
        raise ValueError(f"its record {owners[wrong[0]] + 1} has {shown!r:.40}, which is no pair with a colon")
    flat, starts = parts.flatten(), np.asarray(parts.offsets)[:-1]
    keys, values = (flat.take(pa.array(starts[is_pair] + place)) for place in (0, 1))
    return _Sparse(len(tokens), owners[labels], texts.take(pa.array(labels)), owners[is_pair], keys, values)


def _by_slot(found: _Sparse) -> dict[str, _Sparse]:
    """Return the pairs of each slot."""
    coded = found.keys.dictionary_encode()
    if len(coded.dictionary) > _MOST_SLOTS:
        raise ValueError(f"it has {len(coded.dictionary):,} slots, but {_MOST_SLOTS:,} are the limit: is it svmlight?")
    codes = np.asarray(coded.indices)
    order = np.argsort(codes.astype(np.uint16) if len(coded.dictionary) <= 1 << 16 else codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(coded.dictionary))).tolist()
    slots = coded.dictionary.to_pylist()
    if "label" in slots or "" in slots:
        raise ValueError("a slot is called 'label', or has no name: rename it")
    return {s: found.pairs(order[start:end]) for s, start, end in zip(slots, [0, *ends], ends, strict=False)}


def _cast(texts: pa.StringArray, kind: pa.DataType, owners: Sequence[int] | Places, what: str) -> pa.Array:
    """Convert texts. Raises ArrowInvalid with the record of a text that does not fit."""
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        wrong = first_misfit(pa.chunked_array([texts]), kind)
        text = f"its record {owners[wrong] + 1} has {what} that is no {kind}: {texts[wrong].as_py()!r:.40}"
        raise pa.ArrowInvalid(text) from None
