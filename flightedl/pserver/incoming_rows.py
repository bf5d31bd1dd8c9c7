"""What was sent about rows of tables, before anything is done with it: is it whole, of this pserver's, and finite?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.placement import buckets_of, buckets_of_pserver
from flightedl.errors import GradientError, MessageError
from flightedl.pserver.row_span import ReceivedRows, WantedRows
from flightedl.pserver.row_store import TableGradients
from flightedl.wire.table_rows import Ids, Kind, Section, decode_sections

_FLOAT32 = np.dtype(np.float32)
_PUSHED = (Kind.GRADIENTS, Kind.WANTED)
_ASKED = (Kind.WANTED,)


class IncomingRows:
    """Checks the rows that come for the buckets of one pserver.

    Args:
        plan: Of the tables.
        index: Of the pserver.
    """

    def __init__(self, plan: ShardPlan, index: int) -> None:
        self._tables = plan.tables
        self._buckets = buckets_of_pserver(index, plan.pserver_count)

    def pushed(self, data: memoryview) -> ReceivedRows:
        """What a push carries.

        Raises:
            MessageError: it is damaged, of an unknown table, of ids that do not lie here, or has one twice.
            GradientError: NaN or infinity.
        """
        found = decode_sections(data, self._row_of, _PUSHED) if data else []
        gradients: list[TableGradients] = []
        for section in found:
            self._check_ids(section)
            if section.values is not None:
                self._check_gradients(section)
                gradients.append(TableGradients(section.table, section.ids, section.values))  # type: ignore[arg-type]
        return ReceivedRows(gradients, _wanted(found))

    def asked(self, data: memoryview) -> ReceivedRows:
        """What a lookup asks for. Errors as ``pushed``."""
        found = decode_sections(data, self._row_of, _ASKED) if data else []
        for section in found:
            self._check_ids(section)
        return ReceivedRows((), _wanted(found))

    def _row_of(self, _kind: int, table: int) -> tuple[int, np.dtype[np.generic]]:
        if table >= len(self._tables):
            raise MessageError(f"there is no table of number {table}: {len(self._tables)} are declared")
        return self._tables[table].dim, _FLOAT32

    def _check_ids(self, section: Section) -> None:
        table = self._tables[section.table]
        found = buckets_of(section.ids, table.salt)
        outside = (found < self._buckets.start) | (found >= self._buckets.stop)
        if outside.any():
            raise MessageError(f"id {section.ids[outside][0]} of table {table.name!r} does not lie on this pserver")

    def _check_gradients(self, section: Section) -> None:
        assert section.values is not None, "gradients have values"
        name = self._tables[section.table].name
        if not are_distinct(section.ids):
            raise MessageError(f"a push to table {name!r} has an id twice: add up its gradients")
        finite = np.isfinite(section.values)
        if not finite.all():
            number = section.ids[~finite.all(axis=1)][0]
            raise GradientError(f"table {name!r} has NaN or infinity for id {number}: nothing of it was applied")


def _wanted(sections: Sequence[Section]) -> list[WantedRows]:
    return [WantedRows(section.table, section.ids) for section in sections if section.kind == Kind.WANTED]


def are_distinct(ids: Ids) -> bool:
    """Whether no id is there twice."""
    ordered = np.sort(ids)
    return bool((ordered[1:] != ordered[:-1]).all())
