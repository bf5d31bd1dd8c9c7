"""What a trainer pushes to tables with its next step, and the rows that it looks up: arrays, by pserver, as payloads.

Nothing is decided here: which transfer brings what, and what is done again, is the business of
``domain.trainer.steps``. Gradients that are *pending* belong to the current batch; they leave with its step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from flightedl.client.tables.requests import DistinctIds, Divided
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import MessageError, UsageError
from flightedl.wire.table_rows import Kind, Section, decode_sections, encode_sections

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint64]
Payload = npt.NDArray[np.uint8]

_FLOAT32 = np.dtype(np.float32)
_ANSWERED = (Kind.ROWS, Kind.UNKNOWN)


class WantedTable:
    """Rows of one table that are looked up.

    Args:
        table: Whose.
        ids: As the user gave them.
        pserver_count: Of the job.
    """

    def __init__(self, table: TableSpec, ids: DistinctIds, pserver_count: int) -> None:
        self.ids = ids
        self.divided = Divided(table, ids.ids, pserver_count)
        #: (m, dim) of the distinct ids.
        self.rows: Floats = np.zeros((len(ids.ids), table.dim), np.float32)
        #: Some ids that have no row, of a table where that is an error.
        self.unknown: list[int] = []


class Lookup:
    """Rows of some tables that are asked for together.

    Args:
        plan: Of the job.
        ids: Table number -> its ids.
    """

    def __init__(self, plan: ShardPlan, ids: Mapping[int, DistinctIds]) -> None:
        self._plan = plan
        count = plan.pserver_count
        self.tables = {number: WantedTable(plan.tables[number], found, count) for number, found in sorted(ids.items())}
        #: Pserver -> the lowest version of the rows that came from it, and of how many buckets they came.
        self._versions: dict[int, int] = {}
        self._came: dict[int, int] = {}

    def is_asked(self, pserver: int) -> bool:
        """Whether a pserver has any of the rows."""
        return any(table.divided.count(pserver) for table in self.tables.values())

    def sections(self, pserver: int) -> list[Section]:
        """What is asked of a pserver."""
        return [
            Section(Kind.WANTED, number, table.divided.ids_of(pserver))
            for number, table in self.tables.items()
            if table.divided.count(pserver)
        ]

    def begin(self, pserver: int) -> None:
        """A pserver is about to answer, maybe not for the first time."""
        self._versions.pop(pserver, None)
        self._came[pserver] = 0

    def take(self, pserver: int, blocks: range, version: int, sections: Iterable[Section]) -> None:
        """Rows of some buckets came from a pserver."""
        first, mine = self._plan.block_count, self._plan.buckets_of(pserver)
        buckets = range(blocks.start - first, blocks.stop - first)
        for section in sections:
            table = self.tables.get(section.table)
            if table is None:
                raise MessageError(f"pserver {pserver} sent rows of table {section.table} that nobody asked for")
            if section.values is None:
                table.unknown += section.ids.tolist()
                continue
            at = table.divided.places(pserver) if blocks == mine else table.divided.places_within(pserver, buckets)
            if len(table.rows[at]) != section.row_count:
                raise MessageError(f"pserver {pserver} sent {section.row_count} rows of table {section.table}")
            table.rows[at] = section.values
        self._versions[pserver] = min(version, self._versions.get(pserver, version))
        self._came[pserver] = self._came.get(pserver, 0) + len(blocks)

    def missing(self) -> list[int]:
        """Pservers that have not answered."""
        count = self._plan.pserver_count
        return [p for p in range(count) if self.is_asked(p) and self._came.get(p, 0) < len(self._plan.buckets_of(p))]

    def version(self, pserver: int) -> int:
        """Of the rows that came from a pserver."""
        return self._versions[pserver]

    def has(self, ids: Mapping[int, DistinctIds]) -> bool:
        """Whether it has the rows of all these."""
        return ids.keys() <= self.tables.keys() and all(
            self.tables[number].ids.is_of(found.given) for number, found in ids.items()
        )


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
        self._gradients = {
            number: (Divided(plan.tables[number], ids, plan.pserver_count), values)
            for number, (ids, values) in sorted(gradients.items())
        }

    def pushed(self, pserver: int, *, pull: bool) -> Payload | None:
        """What is sent with a batch; None: only that it arrives."""
        sections = [
            Section(Kind.GRADIENTS, number, divided.ids_of(pserver), values[divided.places(pserver)])
            for number, (divided, values) in self._gradients.items()
        ]
        if pull and self._lookup is not None:
            sections += self._lookup.sections(pserver)
        return encode_sections(sections) if sections else None

    def asked(self, pserver: int) -> Payload | None:
        """What is sent to read rows; None: only the version is wanted."""
        sections = [] if self._lookup is None else self._lookup.sections(pserver)
        return encode_sections(sections) if sections else None

    def begin(self, pserver: int) -> None:
        """A call is about to be made."""
        if self._lookup is not None:
            self._lookup.begin(pserver)

    def take(self, pserver: int, blocks: range, version: int, data: memoryview) -> None:
        """Rows came."""
        sections = decode_sections(data, self._row_of, _ANSWERED)
        if self._lookup is not None:
            self._lookup.take(pserver, blocks, version, sections)

    def _row_of(self, _kind: int, table: int) -> tuple[int, np.dtype[np.generic]]:
        if table >= len(self._plan.tables):
            raise MessageError(f"there is no table of number {table}")
        return self._plan.tables[table].dim, _FLOAT32


class PendingRows:
    """Gradients of rows for the current batch, or of the sum of several.

    Args:
        plan: Of the job.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
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
    """The gradients of rows of several batches, added up until they are pushed as one (``model.accumulation``)."""

    def __init__(self, plan: ShardPlan) -> None:
        self._identity: object = None
        self._pending = PendingRows(plan)

    def add(self, identity: object, gradients: Mapping[int, tuple[Ids, Floats]], weight: int) -> None:
        """Add gradients by table, multiplied by ``weight``."""
        if identity is not self._identity:
            self._identity = identity
            self._pending.clear()
        for number, (ids, values) in gradients.items() if weight else ():
            self._pending.add(number, ids, values if weight == 1 else values * np.float32(weight))

    def take(self, identity: object, divisors: Mapping[int, int]) -> dict[int, tuple[Ids, Floats]]:
        """What is to be pushed, divided by what is given for each table."""
        found = self._pending.take() if identity is self._identity else {}
        self._pending.clear()
        return {
            number: (ids, values / np.float32(divisors[number]) if number in divisors else values)
            for number, (ids, values) in found.items()
        }


def require_known(name: str, unknown: Sequence[int]) -> None:
    """UsageError if ids have no row, of a table where that is an error."""
    if unknown:
        raise UsageError(f"table {name!r} has no row for id {unknown[0]}, and was declared with unknown='error'")
