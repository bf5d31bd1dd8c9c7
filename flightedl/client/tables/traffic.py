"""Payloads for each pserver: gradients of rows that the next step pushes, and lookups.

This module decides nothing: ``domain.trainer.steps`` decides what a transfer carries and what is repeated. *Pending*
gradients belong to the current batch and are sent with its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from flightedl.client.tables.requests import DistinctIds, Divided, kernels, places_within
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import MessageError, UsageError
from flightedl.wire.table_rows import (
    NOTHING,
    Floats,
    Ids,
    Kind,
    Payload,
    Section,
    Sections,
    decode_sections,
    encode_sections,
    header_of,
    payload_of,
)

_ANSWERED = (Kind.ROWS, Kind.UNKNOWN)


class Lookup:
    """A lookup of rows from several tables in one request.

    Args:
        plan: The job's plan.
        ids: Ids by table number.
    """

    def __init__(self, plan: ShardPlan, ids: Mapping[int, DistinctIds]) -> None:
        self._ids = list(ids.values())
        #: Table number -> index of the table in the request.
        self._place_of = {number: place for place, number in enumerate(ids)}
        lengths = [len(found.ids) for found in self._ids]
        self._dims = [plan.tables[number].dim for number in ids]
        #: Index of each table's first element in the flat values, followed by the number of all elements.
        self._bounds = [0, *accumulate(map(mul, lengths, self._dims))]
        #: Rows of all tables' distinct ids, flattened.
        self._values: Floats = np.empty(self._bounds[-1], np.float32)
        self.place(plan)

    def place(self, plan: ShardPlan) -> None:
        self._plan = plan
        ids, specs = self._place_of, [plan.tables[number] for number in self._place_of]
        lengths = [len(found.ids) for found in self._ids]
        self._divided = _divided(plan, specs, [found.ids for found in self._ids])
        #: Header of the complete answer if a single pserver owns all rows; otherwise empty.
        self._header = b""
        if self._divided is None:
            self._asked = [any(lengths)]
            self._header = header_of([(Kind.ROWS, n, count) for n, count in zip(ids, lengths, strict=True) if count])
        else:
            self._asked = (self._divided.counts.sum(1) > 0).tolist()
        #: Table number -> some ids without a row, if every id of the table must have a row.
        self.unknown: dict[int, list[int]] = {}
        #: Pserver -> the lowest version of the rows received from it, and the number of buckets that these rows cover.
        self._versions: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def is_asked(self, pserver: int) -> bool:
        """True if a pserver owns any of the rows."""
        return self._asked[pserver]

    def asked(self, pserver: int) -> list[Section]:
        ids = [found.ids for found in self._ids] if self._divided is None else self._divided.ids_of(pserver)
        optional = [len(found.optional) for found in self._ids]
        if self._divided is not None:
            places = self._divided.places[pserver]
            optional = [int((at < count).sum()) if count else 0 for at, count in zip(places, optional, strict=True)]
        return [
            Section(Kind.WANTED, number, each, optional=count)
            for number, each, count in zip(self._place_of, ids, optional, strict=True)
            if len(each)
        ]

    def begin(self, pserver: int) -> None:
        """Drop a pserver's earlier answer, because it will answer again."""
        self._versions.pop(pserver, None)
        self._received[pserver] = 0

    def take(self, pserver: int, blocks: range, version: int, data: memoryview) -> None:
        """Store the rows in a pserver's answer, which may cover only some of its buckets."""
        is_complete, header = blocks == self._plan.buckets_of(pserver), self._header
        if is_complete and header and len(data) == len(header) + self._values.nbytes and data[: len(header)] == header:
            self._values.data.cast("B")[:] = data[len(header) :]
        else:
            first = self._plan.block_count
            buckets = None if is_complete else range(blocks.start - first, blocks.stop - first)
            self._take_each(pserver, buckets, _answer(self._plan, data))
        self._versions[pserver] = min(version, self._versions.get(pserver, version))
        self._received[pserver] = self._received.get(pserver, 0) + len(blocks)

    def _take_each(self, pserver: int, buckets: range | None, sections: Iterable[Section]) -> None:
        for section in sections:
            place = self._place_of.get(section.table)
            if place is None:
                raise MessageError(f"pserver {pserver} sent rows of table {section.table} without a request")
            if section.values is None:
                self.unknown.setdefault(section.table, []).extend(section.ids.tolist())
                continue
            rows, ids = self.rows(section.table), self._ids[place].ids
            at = np.arange(len(ids)) if self._divided is None else self._divided.places[pserver][place]
            if buckets is not None:
                at = at[places_within(ids[at], self._plan.tables[section.table], buckets)]
            if len(at) != len(section.values):
                raise MessageError(f"pserver {pserver} sent {len(section.values)} rows of table {section.table}")
            rows[at] = section.values

    def missing(self) -> list[int]:
        """Return the pservers whose answers are missing or incomplete."""
        count = self._plan.pserver_count
        return [
            p for p in range(count) if self.is_asked(p) and self._received.get(p, 0) < len(self._plan.buckets_of(p))
        ]

    def version(self, pserver: int) -> int:
        """Return the lowest version among the rows received from a pserver."""
        return self._versions[pserver]

    def has(self, ids: Mapping[int, DistinctIds]) -> bool:
        """Return True if the lookup contains all of these ids."""
        place_of = self._place_of
        return ids.keys() <= place_of.keys() and all(
            known is found or known.is_of(found.given, found.optional)
            for number, found in ids.items()
            for known in (self._ids[place_of[number]],)
        )

    def rows(self, table: int) -> Floats:
        """Return the (m, dim) rows of the table's distinct ids."""
        place = self._place_of[table]
        return self._values[self._bounds[place] : self._bounds[place + 1]].reshape(-1, self._dims[place])

    def spread(self, tables: Sequence[int]) -> list[Floats]:
        """Return the (n, dim) rows of the requested ids as new arrays, one array for each of these tables."""
        places = [self._place_of[number] for number in tables]
        given = [self._ids[place] for place in places]
        if len(given) == 1:
            return [given[0].spread(self.rows(tables[0]))]
        starts, dims, counts = np.array(
            [(self._bounds[place], self._dims[place], len(self._ids[place].given)) for place in places], np.int64
        ).T.copy()
        out = np.empty(int((counts * dims).sum()), np.float32)
        numbers = np.concatenate([found.places for found in given])
        kernels().spread_tables(self._values, starts, dims, counts, numbers, out)
        found = []
        at = 0
        for length, dim in zip(counts.tolist(), dims.tolist(), strict=True):
            found.append(out[at : at + length * dim].reshape(length, dim))
            at += length * dim
        return found


class RowMessages:
    """Rows of one transfer: the payload for each pserver, and where to store the pserver's answer.

    Args:
        plan: The job's plan.
        gradients: Distinct ids and their gradients by table number.
        lookup: Rows to read, or None.
    """

    def __init__(
        self, plan: ShardPlan, gradients: Mapping[int, tuple[Ids, Floats]], lookup: Lookup | None = None
    ) -> None:
        self._plan = plan
        self._lookup = lookup
        self._gradients = gradients
        specs = [plan.tables[number] for number in gradients]
        self._divided = _divided(plan, specs, [ids for ids, _ in gradients.values()]) if gradients else None

    def placed(self, plan: ShardPlan) -> RowMessages:
        """Return messages with the same gradients for the new owners. The messages do not prefetch rows."""
        return RowMessages(plan, self._gradients)

    def pushed(self, pserver: int, *, pull: bool) -> Payload | None:
        """Return the payload to send with a batch, or None if there is none."""
        lookup, gradients = self._lookup if pull else None, self._gradients
        if self._divided is None and lookup is None and len(gradients) == 1:
            ((number, (ids, values)),) = gradients.items()
            return payload_of(number, ids, values)
        sections = [Section(Kind.GRADIENTS, number, ids, values) for number, (ids, values) in gradients.items()]
        if self._divided is not None:
            places = self._divided.places[pserver]
            sections = [
                Section(Kind.GRADIENTS, each.table, each.ids[at], each.values[at])
                for each, at in zip(sections, places, strict=True)
                if each.values is not None
            ]
        if lookup is not None:
            sections += lookup.asked(pserver)
        return encode_sections(sections) if sections else None

    def asked(self, pserver: int) -> Payload | None:
        """Return the payload of a lookup, or None to request only the version."""
        return None if self._lookup is None else encode_sections(self._lookup.asked(pserver))

    def begin(self, pserver: int) -> None:
        if self._lookup is not None:
            self._lookup.begin(pserver)

    def take(self, pserver: int, blocks: range, version: int, data: memoryview) -> None:
        if self._lookup is not None:
            self._lookup.take(pserver, blocks, version, data)
        elif data != NOTHING.data:
            _answer(self._plan, data)


def _divided(plan: ShardPlan, tables: Sequence[TableSpec], ids: Sequence[Ids]) -> Divided | None:
    """Return the ids divided by pserver, or None if a single pserver owns all rows."""
    if plan.pserver_count == 1 or plan.bucket_pservers is None:
        return None
    return Divided(tables, ids, plan.bucket_pservers, plan.pserver_count)


def _answer(plan: ShardPlan, data: memoryview) -> Sections:
    """Decode an answer's rows. Raises MessageError if the payload has another type."""
    return decode_sections(data, np.array([table.dim for table in plan.tables], np.int64), _ANSWERED)


class PendingRows:
    """Gradients of rows for the current batch, or for a sum over several batches."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[Ids, Floats]]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def tables(self) -> Sequence[int]:
        return sorted(self._found)

    def add(self, table: int, ids: Ids, gradients: Floats) -> None:
        """Add gradients of distinct ids. ``take`` sums gradients of the same id."""
        self._found.setdefault(table, []).append((ids, gradients))

    def clear(self) -> None:
        self._found = {}

    def take(self) -> dict[int, tuple[Ids, Floats]]:
        """Return distinct ids and their summed gradients, by table number."""
        return {number: _summed(found) for number, found in self._found.items()}


def _summed(found: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, Floats]:
    if len(found) == 1:
        return found[0]
    distinct = DistinctIds(np.concatenate([ids for ids, _ in found]))
    return distinct.ids, distinct.summed(np.concatenate([values for _, values in found]))[0]


class RowSums:
    """Gradients of rows that are accumulated over several batches and then pushed together (``model.kept``)."""

    def __init__(self) -> None:
        self._identity: object = None
        self._pending = PendingRows()

    def add(self, identity: object, gradients: Mapping[int, tuple[Ids, Floats]], weight: int) -> None:
        if identity != self._identity:
            self._identity = identity
            self._pending.clear()
        for number, (ids, values) in gradients.items() if weight else ():
            self._pending.add(number, ids, values if weight == 1 else values * np.float32(weight))

    def take(self, identity: object, divisors: Mapping[int, int]) -> dict[int, tuple[Ids, Floats]]:
        """Return and clear the accumulated gradients, divided by each table's divisor."""
        found = self._pending.take() if identity == self._identity else {}
        self._pending.clear()
        return {
            number: (ids, values / np.float32(divisors[number]) if number in divisors else values)
            for number, (ids, values) in found.items()
        }


def require_known(name: str, unknown: Sequence[int]) -> None:
    """Raise UsageError if a requested id has no row."""
    if unknown:
        raise UsageError(f"table {name!r} has no row for id {unknown[0]}, and was declared with unknown='error'")
