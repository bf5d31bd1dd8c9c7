"""What a trainer pushes to tables with its next step, and the rows that it looks up: arrays, by pserver, as payloads.

Nothing is decided here: which transfer brings what, and what is done again, is the business of
``domain.trainer.steps``. Gradients that are *pending* belong to the current batch; they leave with its step.
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
    """Rows of some tables that are asked for together.

    Args:
        plan: Of the job.
        ids: Table number -> its ids.
    """

    def __init__(self, plan: ShardPlan, ids: Mapping[int, DistinctIds]) -> None:
        self._ids = list(ids.values())
        #: Table number -> its place among those that are asked for.
        self._place_of = {number: place for place, number in enumerate(ids)}
        lengths = [len(found.ids) for found in self._ids]
        self._dims = [plan.tables[number].dim for number in ids]
        #: Where the rows of each table begin in the values, and where the last ones end.
        self._bounds = [0, *accumulate(map(mul, lengths, self._dims))]
        #: Of the distinct ids of all tables, flat.
        self._values: Floats = np.empty(self._bounds[-1], np.float32)
        self.place(plan)

    def place(self, plan: ShardPlan) -> None:
        """Let these pservers own the rows, of which none has come."""
        self._plan = plan
        ids, specs = self._place_of, [plan.tables[number] for number in self._place_of]
        lengths = [len(found.ids) for found in self._ids]
        self._divided = _divided(plan, specs, [found.ids for found in self._ids])
        #: How the answer begins that brings just these from the only pserver; empty if there are several.
        self._header = b""
        if self._divided is None:
            self._asked = [any(lengths)]
            self._header = header_of([(Kind.ROWS, n, count) for n, count in zip(ids, lengths, strict=True) if count])
        else:
            self._asked = (self._divided.counts.sum(1) > 0).tolist()
        #: Table number -> some ids that have no row, of a table where that is an error.
        self.unknown: dict[int, list[int]] = {}
        #: Pserver -> the lowest version of the rows that came from it, and of how many buckets they came.
        self._versions: dict[int, int] = {}
        self._came: dict[int, int] = {}

    def is_asked(self, pserver: int) -> bool:
        """True if a pserver has any of the rows."""
        return self._asked[pserver]

    def asked(self, pserver: int) -> list[Section]:
        """Return what is asked of a pserver."""
        ids = [found.ids for found in self._ids] if self._divided is None else self._divided.ids_of(pserver)
        return [
            Section(Kind.WANTED, number, each) for number, each in zip(self._place_of, ids, strict=True) if len(each)
        ]

    def begin(self, pserver: int) -> None:
        """Forget an earlier answer of a pserver, which is about to answer."""
        self._versions.pop(pserver, None)
        self._came[pserver] = 0

    def take(self, pserver: int, blocks: range, version: int, data: memoryview) -> None:
        """Take over rows of some buckets, which came from a pserver."""
        is_whole, header = blocks == self._plan.buckets_of(pserver), self._header
        if is_whole and header and len(data) == len(header) + self._values.nbytes and data[: len(header)] == header:
            self._values.data.cast("B")[:] = data[len(header) :]
        else:
            first = self._plan.block_count
            buckets = None if is_whole else range(blocks.start - first, blocks.stop - first)
            self._take_each(pserver, buckets, _answer(self._plan, data))
        self._versions[pserver] = min(version, self._versions.get(pserver, version))
        self._came[pserver] = self._came.get(pserver, 0) + len(blocks)

    def _take_each(self, pserver: int, buckets: range | None, sections: Iterable[Section]) -> None:
        for section in sections:
            place = self._place_of.get(section.table)
            if place is None:
                raise MessageError(f"pserver {pserver} sent rows of table {section.table} that nobody asked for")
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
        """Pservers that have not answered."""
        count = self._plan.pserver_count
        return [p for p in range(count) if self.is_asked(p) and self._came.get(p, 0) < len(self._plan.buckets_of(p))]

    def version(self, pserver: int) -> int:
        """Of the rows that came from a pserver."""
        return self._versions[pserver]

    def has(self, ids: Mapping[int, DistinctIds]) -> bool:
        """Whether it has the rows of all these."""
        place_of = self._place_of
        return ids.keys() <= place_of.keys() and all(
            known is found or known.is_of(found.given)
            for number, found in ids.items()
            for known in (self._ids[place_of[number]],)
        )

    def rows(self, table: int) -> Floats:
        """(m, dim) of the distinct ids of a table."""
        place = self._place_of[table]
        return self._values[self._bounds[place] : self._bounds[place + 1]].reshape(-1, self._dims[place])

    def spread(self, tables: Sequence[int]) -> list[Floats]:
        """Of each of these tables (n, dim) rows of the ids as they were given: nobody else's arrays."""
        places = [self._place_of[number] for number in tables]
        given = [self._ids[place] for place in places]
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
    """The rows of one transfer: what each pserver is sent, and where its answers go.

    Args:
        plan: Of the job.
        gradients: Table number -> distinct ids and their gradients.
        lookup: Rows that are wanted; None: none are.
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
        """Return the same gradients on their way to other owners; rows that were wanted in advance are not."""
        return RowMessages(plan, self._gradients)

    def pushed(self, pserver: int, *, pull: bool) -> Payload | None:
        """Return what is sent with a batch; None: only that it arrives."""
        lookup, gradients = self._lookup if pull else None, self._gradients
        if self._divided is None and lookup is None and len(gradients) == 1:
            ((number, (ids, values)),) = gradients.items()
            return payload_of(number, ids, values)
        sections = [Section(Kind.GRADIENTS, number, ids, values) for number, (ids, values) in gradients.items()]
        if self._divided is not None:
            places = self._divided.places[pserver]
            sections = [
                Section(Kind.GRADIENTS, table, ids[at], values[at])
                for (_, table, ids, values), at in zip(sections, places, strict=True)
                if values is not None
            ]
        if lookup is not None:
            sections += lookup.asked(pserver)
        return encode_sections(sections) if sections else None

    def asked(self, pserver: int) -> Payload | None:
        """What is sent to read rows; None: only the version is wanted."""
        return None if self._lookup is None else encode_sections(self._lookup.asked(pserver))

    def begin(self, pserver: int) -> None:
        """A call is about to be made."""
        if self._lookup is not None:
            self._lookup.begin(pserver)

    def take(self, pserver: int, blocks: range, version: int, data: memoryview) -> None:
        """Rows came."""
        if self._lookup is not None:
            self._lookup.take(pserver, blocks, version, data)
        elif data != NOTHING.data:
            _answer(self._plan, data)


def _divided(plan: ShardPlan, tables: Sequence[TableSpec], ids: Sequence[Ids]) -> Divided | None:
    """Return ids of tables by pserver; None if there is only one."""
    if plan.pserver_count == 1 or plan.bucket_pservers is None:
        return None
    return Divided(tables, ids, plan.bucket_pservers, plan.pserver_count)


def _answer(plan: ShardPlan, data: memoryview) -> Sections:
    """Rows that came.

    Raises:
        MessageError: they are something else.
    """
    return decode_sections(data, np.array([table.dim for table in plan.tables], np.int64), _ANSWERED)


class PendingRows:
    """Gradients of rows for the current batch, or of the sum of several."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[Ids, Floats]]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def tables(self) -> Sequence[int]:
        """Numbers of the tables that have any."""
        return sorted(self._found)

    def add(self, table: int, ids: Ids, gradients: Floats) -> None:
        """Gradients of distinct ids; what the table has already of one is added to it later."""
        self._found.setdefault(table, []).append((ids, gradients))

    def clear(self) -> None:
        """Forget them."""
        self._found = {}

    def take(self) -> dict[int, tuple[Ids, Floats]]:
        """Table number -> distinct ids and their gradients."""
        return {number: _together(found) for number, found in self._found.items()}


def _together(found: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, Floats]:
    if len(found) == 1:
        return found[0]
    distinct = DistinctIds(np.concatenate([ids for ids, _ in found]))
    return distinct.ids, distinct.summed(np.concatenate([values for _, values in found]))[0]


class RowSums:
    """The gradients of rows of several batches, added up until they are pushed as one (``model.kept``)."""

    def __init__(self) -> None:
        self._identity: object = None
        self._pending = PendingRows()

    def add(self, identity: object, gradients: Mapping[int, tuple[Ids, Floats]], weight: int) -> None:
        """Add gradients by table, multiplied by ``weight``."""
        if identity != self._identity:
            self._identity = identity
            self._pending.clear()
        for number, (ids, values) in gradients.items() if weight else ():
            self._pending.add(number, ids, values if weight == 1 else values * np.float32(weight))

    def take(self, identity: object, divisors: Mapping[int, int]) -> dict[int, tuple[Ids, Floats]]:
        """What is to be pushed, divided by what is given for each table."""
        found = self._pending.take() if identity == self._identity else {}
        self._pending.clear()
        return {
            number: (ids, values / np.float32(divisors[number]) if number in divisors else values)
            for number, (ids, values) in found.items()
        }


def require_known(name: str, unknown: Sequence[int]) -> None:
    """UsageError if ids have no row, of a table where that is an error."""
    if unknown:
        raise UsageError(f"table {name!r} has no row for id {unknown[0]}, and was declared with unknown='error'")
