"""Reads of parameters and tables as Arrow columns, by any Flight client.

A ticket names rows of a parameter or table, and the state to read. The present values are read span by span, so each
block has a single version, but different blocks may have different versions. A cut that was made on request is read
from memory. A checkpoint's values are read from its files, which together contain one consistent cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from flightedl.coordination.checkpoint_places import specs_of
from flightedl.domain.checkpoint.manifest import Manifest
from flightedl.domain.checkpoint.restoring import saved_plan, saved_tables
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.row_ranges import require_range, width_of
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import NotFoundError
from flightedl.formats.checkpoint_files import checkpoint_numbered, parameter_pieces
from flightedl.messages.reading import ReadTicket, cut_name
from flightedl.ports import Storage
from flightedl.pserver.cuts.kept import KeptCut, RequestedCuts
from flightedl.pserver.shard import Shard
from flightedl.rpc.routes import Outgoing
from flightedl.wire.rows import Array


class Reading:
    """Reads of one pserver.

    Args:
        job: Name of the job.
        plan: Plan of the model.
        shard: The pserver's blocks and rows.
        storage: Storage of the checkpoints; None if the job writes no checkpoints.
        cuts: The cuts that were made on request.
    """

    def __init__(self, job: str, plan: ShardPlan, shard: Shard, storage: Storage | None, cuts: RequestedCuts) -> None:
        self._job = job
        self._plan = plan
        self._shard = shard
        self._storage = storage
        self._cuts = cuts

    def answer(self, request: ReadTicket) -> Outgoing:
        """Return the rows that a ticket requests.

        Raises:
            MessageError: the ticket requests rows, columns or blocks that are not here.
            NotFoundError: the parameter, table, cut or checkpoint does not exist.
            StalePlacementError: the rows have moved to another pserver.
        """
        about: dict[str, object] = {"job": self._job, "plan": self._shard.plan_hash}
        manifest = kept = None
        if request.cut is not None:
            kept = self._cuts.kept(request.cut)
            about |= {"cut": cut_name(request.cut), "versions": kept.versions}
        elif request.checkpoint is None:
            about |= {"cut": "latest", "versions": self._shard.version_range()}
        else:
            manifest = self._manifest(request.checkpoint)
            lowest = min((shard.lowest_version for shard in manifest.shards), default=0)
            highest = max((shard.highest_version for shard in manifest.shards), default=0)
            about |= {"cut": f"checkpoint {manifest.number}", "versions": (lowest, highest)}
        if request.kind == "table":
            return self._table(request, manifest, kept, about)
        return self._parameter(request, manifest, kept, about)

    def _manifest(self, number: int) -> Manifest:
        if self._storage is None:
            raise NotFoundError("this job keeps no checkpoints: read the latest values")
        return checkpoint_numbered(self._storage, self._job, number)

    def _parameter(
        self, request: ReadTicket, manifest: Manifest | None, kept: KeptCut | None, about: dict[str, object]
    ) -> Outgoing:
        # Imported lazily: Parquet is slow to import, and few jobs are read as Arrow columns.
        from flightedl.formats.columns import parameter_batches, parameter_schema

        spec = _named(self._plan.parameters, request.name)
        width = 1 if request.is_flat else width_of(spec)
        rows = require_range(spec.name, request.start, request.stop, spec.size // width)
        if request.is_flat:
            spec = ParameterSpec(spec.name, (spec.size,), spec.dtype)
        start, stop = rows.start * width, rows.stop * width
        if manifest is None:
            pieces = self._present(spec.name, start, stop, kept)
        else:
            pieces = self._saved(manifest, spec.name, start, stop)
        schema = parameter_schema(spec, rows.start, about, request.columns)
        return Outgoing(schema, ((batch, None) for batch in parameter_batches(schema, spec, pieces)))

    def _present(self, name: str, start: int, stop: int, kept: KeptCut | None) -> Iterator[Array]:
        plan = self._plan
        numbers = plan.block_range(name)
        first, end = np.searchsorted(plan.block_stops[numbers.start : numbers.stop], (start, stop - 1), side="right")
        numbers = numbers[int(first) : int(end) + 1] if stop > start else range(0)
        if kept is not None:
            starts = (int(plan.block_starts[number]) for number in numbers)
            return (
                values[max(start - begin, 0) : stop - begin]
                for begin, values in zip(starts, kept.values_of(numbers), strict=True)
            )
        for number in numbers:
            self._shard.dense.span(number)

        def pieces() -> Iterator[Array]:
            number, at = numbers.start, start
            while number < numbers.stop and at < stop:
                values, _, _ = self._shard.values(range(number, numbers.stop))
                begin = int(plan.block_starts[number])
                yield values[at - begin : stop - begin]
                at = begin + values.size
                number = int(np.searchsorted(plan.block_stops[numbers.start : numbers.stop], at, side="right"))
                number += numbers.start

        return pieces()

    def _saved(self, manifest: Manifest, name: str, start: int, stop: int) -> Iterator[Array]:
        assert self._storage is not None, "a manifest comes from a storage"
        specs = specs_of(manifest)
        return parameter_pieces(self._storage, manifest, saved_plan(manifest, specs), _named(specs, name), start, stop)

    def _table(
        self, request: ReadTicket, manifest: Manifest | None, kept: KeptCut | None, about: dict[str, object]
    ) -> Outgoing:
        from flightedl.formats.columns import table_batches, table_schema
        from flightedl.formats.stored_tables import stored_rows

        tables = self._plan.tables if manifest is None else saved_tables(manifest)
        spec = _named(tables, request.name)
        schema = table_schema(spec, about, request.columns)
        buckets = require_range(f"the buckets of {spec.name}", request.start, request.stop, BUCKETS)
        if manifest is None:
            rows = self._shard.all_rows(tables.index(spec), buckets, kept)
        else:
            assert self._storage is not None, "a manifest comes from a storage"
            rows = stored_rows(self._storage, manifest, tables.index(spec), spec, buckets)
        return Outgoing(schema, ((batch, None) for batch in table_batches(schema, spec, rows)))


_Spec = TypeVar("_Spec", ParameterSpec, TableSpec)


def _named(specs: Sequence[_Spec], name: str) -> _Spec:
    for spec in specs:
        if spec.name == name:
            return spec
    raise NotFoundError(f"the model has no {name!r:.80}: ListFlights names its parameters and tables")
