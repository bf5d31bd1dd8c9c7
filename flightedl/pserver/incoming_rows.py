"""What was sent about rows of tables, before anything is done with it: is it whole, of this pserver's, and finite?"""

from __future__ import annotations

import numpy as np

from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.placement import buckets_of, buckets_of_pserver
from flightedl.errors import GradientError, MessageError
from flightedl.kernels import rows
from flightedl.kernels.compiled import block_kernels
from flightedl.kernels.compiled_rows import row_kernel
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
        gradients: list[TableGradients] = []
        wanted: list[WantedRows] = []
        for section in decode_sections(data, self._row_of, _PUSHED) if data else ():
            ids = self._checked(section)
            if section.values is None:
                wanted.append(WantedRows(section.table, ids))
            else:
                self._require_finite(section)
                gradients.append(TableGradients(section.table, ids, section.values))  # type: ignore[arg-type]
        return ReceivedRows(gradients, wanted)

    def asked(self, data: memoryview) -> ReceivedRows:
        """What a lookup asks for. Errors as ``pushed``."""
        found = decode_sections(data, self._row_of, _ASKED) if data else ()
        return ReceivedRows((), [WantedRows(section.table, self._checked(section)) for section in found])

    def _row_of(self, _kind: int, table: int) -> tuple[int, np.dtype[np.generic]]:
        if table >= len(self._tables):
            raise MessageError(f"there is no table of number {table}: {len(self._tables)} are declared")
        return self._tables[table].dim, _FLOAT32

    def _checked(self, section: Section) -> Ids:
        """The ids of a section."""
        table = self._tables[section.table]
        ids = section.ids
        seen = np.zeros(1 << (2 * ids.size).bit_length(), np.uint64)
        if not row_kernel(rows.problem)(ids, table.salt, self._buckets.start, self._buckets.stop, seen):
            return ids
        places = buckets_of(ids, table.salt)
        outside = (places < self._buckets.start) | (places >= self._buckets.stop)
        if outside.any():
            raise MessageError(f"id {ids[outside][0]} of table {table.name!r} does not lie on this pserver")
        raise MessageError(f"an id of table {table.name!r} is there twice: add up its gradients")

    def _require_finite(self, section: Section) -> None:
        assert section.values is not None, "gradients have values"
        if block_kernels("float32").all_finite(section.values.reshape(-1)):
            return
        number = section.ids[~np.isfinite(section.values).all(axis=1)][0]
        name = self._tables[section.table].name
        raise GradientError(f"table {name!r} has NaN or infinity for id {number}: nothing of it was applied")
