"""Decode and validate the rows in trainers' messages, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flightedl.domain.tables.placement import buckets_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import GradientError, MessageError
from flightedl.kernels import rows
from flightedl.kernels.compiled_rows import row_kernel
from flightedl.kernels.plain import index_size
from flightedl.pserver.stores.row_span import ReceivedRows
from flightedl.rowstore.values import NO_ROWS, NO_SHIFTS, Floats, Ids, Numbers, TableRows
from flightedl.wire.table_rows import IDS_AT, LAYOUT, SECTION_BYTES, START, Kind, Section, decode_sections

_NO_VALUES: Floats = np.empty(0, np.float32)


def _those(found: Numbers, ids: Ids, values: Floats = _NO_VALUES, optional: Numbers = NO_SHIFTS) -> TableRows:
    if not found.shape[1]:
        return NO_ROWS
    tables, dims, counts, starts, value_starts = found
    return TableRows(tables, dims, counts, starts, value_starts, ids, values, optional)


class IncomingRows:
    """Decoder of messages about adjacent buckets.

    Args:
        tables: The job's tables.
    """

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self._tables = tables
        self._dims = np.array([table.dim for table in tables], np.int64)
        self._salts = np.array([table.salt for table in tables], np.uint64)

    def pushed(self, data: memoryview, buckets: range, *, is_finite: bool = False) -> ReceivedRows:
        """Return the content of a push to these buckets. Set ``is_finite`` if the values have been checked.

        Raises:
            MessageError: the content is damaged, or contains an unknown table, an id of another bucket, or an id twice.
            GradientError: the content contains NaN or infinity.
        """
        return self._received(data, buckets, may_push=True, is_finite=is_finite)

    def asked(self, data: memoryview, buckets: range) -> ReceivedRows:
        """Return the content of a lookup. Raises the same errors as ``pushed``."""
        return self._received(data, buckets, may_push=False, is_finite=True)

    def _received(self, data: memoryview, buckets: range, *, may_push: bool, is_finite: bool) -> ReceivedRows:
        if not data:
            return ReceivedRows()
        size_bytes, tables = len(data), len(self._tables)
        layout, count = START.unpack_from(data) if size_bytes >= IDS_AT else (0, 0)
        start = IDS_AT + count * SECTION_BYTES
        if layout != LAYOUT or size_bytes < start or size_bytes % 4:
            raise self._problem(data, buckets, may_push=may_push)
        words = np.frombuffer(data, np.uint32)
        ids = np.frombuffer(data, np.uint64, (size_bytes - start) // 8, start)
        found = np.empty((rows.RECEIVED_SIZE, 2 * tables), np.int64)
        seen = np.empty(index_size(len(ids)), np.int32)
        ends = np.array([buckets.start, buckets.stop], np.int64)
        given = (words, ids, self._dims, self._salts, ends, may_push, is_finite, seen, found)
        number = row_kernel(rows.received)(*given)
        if number < 0:
            raise self._problem(data, buckets, may_push=may_push)
        pushed, asked = divmod(number, tables + 1)
        gradients = NO_ROWS
        if pushed:
            total = int((found[rows.RECEIVED_COUNT, :pushed] * found[rows.RECEIVED_DIM, :pushed]).sum())
            gradients = _those(found[:, :pushed], ids, np.frombuffer(data, np.float32, total, size_bytes - 4 * total))
        kinds, wanted = words[2 : 2 + 4 * count : 4], found[:, tables : tables + asked]
        optional = np.minimum(kinds[(kinds & 0xFFFF) == Kind.WANTED] >> 16, wanted[rows.RECEIVED_COUNT])
        return ReceivedRows(gradients, _those(wanted, ids, optional=optional))

    def _problem(self, data: memoryview, buckets: range, *, may_push: bool) -> Exception:
        try:
            kinds = (Kind.GRADIENTS, Kind.WANTED) if may_push else (Kind.WANTED,)
            for section in decode_sections(data, self._dims, kinds):
                if error := self._problem_of(section, buckets):
                    return error
        except MessageError as error:
            return error
        raise AssertionError("only the compiled check found the message invalid")

    def _problem_of(self, section: Section, buckets: range) -> Exception | None:
        table = self._tables[section.table]
        ids = section.ids
        places = buckets_of(ids, table.salt)
        outside = (places < buckets.start) | (places >= buckets.stop)
        if outside.any():
            return MessageError(f"id {ids[outside][0]} of table {table.name!r} does not belong to this pserver")
        if section.values is not None and len(np.unique(ids)) < len(ids):
            return MessageError(f"the message has an id of table {table.name!r} twice: add up its gradients")
        if section.values is None or (finite := np.isfinite(section.values).all(axis=1)).all():
            return None
        return GradientError(
            f"table {table.name!r} has NaN or infinity for id {ids[~finite][0]}: the push was not applied"
        )
