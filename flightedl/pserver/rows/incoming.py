"""What was sent about rows of tables, before anything is done with it: is it whole, of this pserver's, and finite?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.placement import buckets_of, buckets_of_pserver
from flightedl.errors import GradientError, MessageError
from flightedl.kernels import rows
from flightedl.kernels.compiled_rows import row_kernel
from flightedl.kernels.plain import index_size
from flightedl.pserver.rows.span import ReceivedRows
from flightedl.pserver.rows.values import Floats, TableRows, begins
from flightedl.wire.table_rows import Kind, Section, Sections, decode_sections

_PUSHED = (Kind.GRADIENTS, Kind.WANTED)
_ASKED = (Kind.WANTED,)
_NO_VALUES: Floats = np.empty(0, np.float32)


def _those(sections: Sections, chosen: npt.NDArray[np.bool_], values: Floats = _NO_VALUES) -> TableRows:
    """Some of the sections; those that have values, or none of them."""
    tables, dims, counts, starts = (
        each[chosen] for each in (sections.tables, sections.dims, sections.counts, begins(sections.counts))
    )
    return TableRows(tables, dims, counts, starts, begins(counts * dims), sections.ids, values)


class IncomingRows:
    """Checks the rows that come for the buckets of one pserver.

    Args:
        plan: Of the tables.
        index: Of the pserver.
    """

    def __init__(self, plan: ShardPlan, index: int) -> None:
        self._tables = plan.tables
        self._buckets = buckets_of_pserver(index, plan.pserver_count)
        self._dims = np.array([table.dim for table in plan.tables], np.int64)
        self._salts = np.array([table.salt for table in plan.tables], np.uint64)

    def pushed(self, data: memoryview) -> ReceivedRows:
        """What a push carries.

        Raises:
            MessageError: it is damaged, of an unknown table, of ids that do not lie here, or has one twice.
            GradientError: NaN or infinity.
        """
        return self._received(data, _PUSHED)

    def asked(self, data: memoryview) -> ReceivedRows:
        """What a lookup asks for. Errors as ``pushed``."""
        return self._received(data, _ASKED)

    def _received(self, data: memoryview, kinds: Sequence[Kind]) -> ReceivedRows:
        if not data:
            return ReceivedRows()
        sections = decode_sections(data, self._dims, kinds)
        is_pushed = sections.kinds == Kind.GRADIENTS
        self._check(sections, is_pushed)
        return ReceivedRows(_those(sections, is_pushed, sections.values), _those(sections, ~is_pushed))

    def _check(self, sections: Sections, is_pushed: npt.NDArray[np.bool_]) -> None:
        counts = sections.counts
        sizes = np.where(is_pushed, counts * sections.dims, 0)
        seen = np.empty(index_size(int(counts.max(initial=0))), np.uint64)
        number = row_kernel(rows.first_problem)(
            counts,
            sizes,
            self._salts[sections.tables],
            sections.ids,
            sections.values.view(np.uint32),
            self._buckets.start,
            self._buckets.stop,
            seen,
        )
        if number >= 0:
            raise self._problem_of(next(islice(sections, number, None)))

    def _problem_of(self, section: Section) -> Exception:
        table = self._tables[section.table]
        ids = section.ids
        places = buckets_of(ids, table.salt)
        outside = (places < self._buckets.start) | (places >= self._buckets.stop)
        if outside.any():
            return MessageError(f"id {ids[outside][0]} of table {table.name!r} does not lie on this pserver")
        if len(np.unique(ids)) < len(ids):
            return MessageError(f"an id of table {table.name!r} is there twice: add up its gradients")
        assert section.values is not None, "nothing else is wrong with ids"
        number = ids[~np.isfinite(section.values).all(axis=1)][0]
        return GradientError(f"table {table.name!r} has NaN or infinity for id {number}: nothing of it was applied")
