"""Locations of parameters and tables, for any Flight client. Also reads rows split between several pservers.

On request, the master has all pservers make a cut. It remembers only the newest one, and a successor none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pyarrow as pa
from msgspec.structs import replace

from flightedl.coordination.directory import Directory
from flightedl.domain.checkpoint.cuts import CutAgreement
from flightedl.domain.consistency.modes import Sync
from flightedl.domain.model.declared import plan_of
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.row_ranges import MAX_WIDTH, require_range, row_ranges, width_of
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.tables.placement import BUCKETS
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import MessageError, NotFoundError, NotReadyError, ReplacedError, UnavailableError
from flightedl.master.state import JobState
from flightedl.messages.base import decode, encode
from flightedl.messages.control import SnapshotReply
from flightedl.messages.reading import CutNumber, ReadCommand, ReadTicket, cut_name
from flightedl.rpc.call import Call
from flightedl.rpc.client import Connection
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import ServerIdentity
from flightedl.rpc.routes import Answer, Endpoint, Endpoints

_READ_S = 10.0
#: Time limit of making a cut, and interval between two requests to a pserver that has not made it.
_CUT_S = 20.0
_POLL_S = 0.02
#: Interval between two attempts to make a cut.
_RETRY_S = 0.1
#: Number that represents the master in lists of servers.
_MASTER = -1


class ModelLocations:
    """Locations of one job's parameters and tables. Thread-safe.

    Args:
        state: State of the job.
        job: Name of the job.
        generation: Generation of the master.
        directory: Addresses of the servers.
        connector: Opens connections to the pservers.
    """

    def __init__(self, state: JobState, job: str, generation: int, directory: Directory, connector: Connector) -> None:
        self._state = state
        self._job = job
        self._generation = generation
        self._directory = directory
        self._connector = connector
        self._lock = threading.Lock()
        self._known: ShardPlan | None = None
        #: Held while a cut is made.
        self._cutting = threading.Lock()
        self._cut_count = 0
        #: The newest complete cut, and the plan when it was requested.
        self._cut: tuple[CutNumber, ShardPlan] | None = None

    def _plan(self) -> ShardPlan:
        model = self._state.core.declaration.model
        if model is None:
            raise NotReadyError("no trainer has declared the model yet")
        with self._lock:
            if self._known is None or self._known.hash != model.plan_hash:
                self._known = plan_of(model)
            return self._known

    def commands(self, criteria: bytes) -> list[bytes]:
        """Return a command for each parameter and table whose name begins with the string in the criteria.

        Raises:
            NotReadyError: the model has not been declared yet.
        """
        plan, prefix = self._plan(), criteria.decode(errors="replace")
        names = [("parameter", spec.name) for spec in plan.parameters] + [("table", spec.name) for spec in plan.tables]
        return [encode(ReadCommand(name=name, kind=kind)) for kind, name in names if name.startswith(prefix)]  # type: ignore[arg-type]

    def endpoints(self, command: bytes, call: Call) -> Endpoints:
        """Return where a parameter or table can be read.

        Raises:
            MessageError: the command is invalid.
            NotFoundError: the parameter or table does not exist, or there is no checkpoint or cut.
            NotReadyError: the model has not been declared, a pserver is missing, or no cut could be made in time.
            UnavailableError: a pserver cannot be reached, or has no memory for a cut.
        """
        from flightedl.formats.columns import parameter_schema, table_schema

        request, plan = decode(command, ReadCommand), self._plan()
        spec = _spec_of(plan, request)
        checkpoint, cut = self._checkpoint() if request.cut == "checkpoint" else None, None
        if request.cut == "new":
            cut, plan = self._new_cut(call)
        elif request.cut == "kept":
            cut, plan = self._kept_cut()
        about = {"job": self._job, "plan": plan.hash, "cut": _cut(checkpoint, cut)}
        ticket = ReadTicket(
            plan_hash=plan.hash,
            name=spec.name,
            kind="table" if isinstance(spec, TableSpec) else "parameter",
            checkpoint=checkpoint,
            cut=cut,
            stop=0,
            columns=request.columns,
        )
        record_count = size_bytes = -1
        if isinstance(spec, TableSpec):
            schema = table_schema(spec, about, request.columns)
            rows = require_range(f"the buckets of {spec.name}", request.start, request.stop, BUCKETS)
            ranges = _bucket_ranges(plan, rows)
        else:
            schema, width = parameter_schema(spec, request.start, about, request.columns), width_of(spec)
            rows = require_range(spec.name, request.start, request.stop, spec.size // width)
            ranges = _parameter_ranges(plan, spec, rows, is_saved=checkpoint is not None)
            record_count, size_bytes = len(rows), len(rows) * width * spec.seen_item_bytes
        found = [each for each in ranges if each[1] < each[2]] or [(0, rows.start, rows.start)]
        tickets = [(owner, replace(ticket, start=start, stop=stop)) for owner, start, stop in found]
        return Endpoints(schema, tuple(self._located(tickets)), record_count, size_bytes, is_ordered=True)

    def _kept_cut(self) -> tuple[CutNumber, ShardPlan]:
        if self._cut is None:
            raise NotFoundError("this master has made no cut yet: request a new one")
        return self._cut

    def _new_cut(self, call: Call) -> tuple[CutNumber, ShardPlan]:
        """Have all pservers make a cut, while other requests for cuts wait.

        If blocks move, or a pserver is replaced, another cut is begun with the new owners.
        """
        with self._cutting:
            deadline = min(self._state.clock.now() + _CUT_S, call.deadline)
            while True:
                try:
                    plan, agreement = self._agreement(call, deadline)
                except (UnavailableError, ReplacedError):
                    if self._state.clock.now() + _RETRY_S > deadline:
                        raise
                    call.check()
                    call.closing.wait(_RETRY_S)
                    continue
                if agreement.trouble:
                    raise UnavailableError(agreement.trouble)
                self._cut = (self._generation, self._cut_count), plan
                return self._cut

    def _agreement(self, call: Call, deadline: float) -> tuple[ShardPlan, CutAgreement]:
        """Ask all pservers until they have made a cut, or one of them cannot make it."""
        state, plan = self._state, self._plan()
        members, indices = state.core.members, range(plan.pserver_count)
        self._cut_count += 1
        has_rounds = members is not None and isinstance(members.membership.mode, Sync)
        agreement = CutAgreement(
            indices, self._generation, self._cut_count, plan.hash, state.clock.now(), has_rounds=has_rounds
        )
        with contextlib.ExitStack() as held:
            connections = [held.enter_context(self._connection(index)) for index in indices]
            while True:
                for index, connection in enumerate(connections):
                    if (request := agreement.request(index)) is not None:
                        reply = decode(connection.action("cut", encode(request), timeout_s=_READ_S), SnapshotReply)
                        agreement.answered(index, reply, state.clock.now())
                if agreement.is_complete or agreement.trouble:
                    return plan, agreement
                if state.clock.now() > deadline:
                    raise NotReadyError("the pservers could not agree on a round for the cut in time: try again")
                call.check()
                call.closing.wait(_POLL_S)

    def _connection(self, index: int) -> Connection:
        record = self._directory.pservers().get(index)
        if record is None:
            raise NotReadyError(f"pserver {index} is being replaced: ask again in a moment")
        return self._connector.connect(record.address, ServerIdentity(self._job, "pserver", index, record.generation))

    def _checkpoint(self) -> int:
        latest = self._state.core.checkpointing.latest
        if not latest:
            raise NotFoundError("the job has no complete checkpoint yet: read the latest values, or make a checkpoint")
        return latest

    def _located(self, tickets: Iterable[tuple[int, ReadTicket]]) -> Iterator[Endpoint]:
        servers, master = self._directory.pservers(), self._directory.master()
        for owner, ticket in tickets:
            server = master if owner == _MASTER else servers.get(owner)
            if server is None and owner >= self._plan().pserver_count:
                raise NotFoundError(f"pserver {owner}, which has a part of the cut, has ended: request a new one")
            if server is None:
                raise NotReadyError("a server is being replaced: ask again in a moment")
            yield Endpoint(encode(ticket), (server.address,))

    def read(self, ticket: bytes) -> Answer:
        """Return rows of a parameter whose elements are on several pservers.

        Raises:
            MessageError: the ticket is invalid, or requests more than a row.
            NotFoundError: the parameter does not exist.
            UnavailableError: a pserver does not answer.
        """
        from flightedl.formats.columns import parameter_schema

        request, plan = decode(ticket, ReadTicket), self._plan()
        if self._cut is not None and request.cut == self._cut[0]:
            plan = self._cut[1]
        spec = _spec_of(plan, ReadCommand(name=request.name, kind=request.kind))
        if isinstance(spec, TableSpec) or request.checkpoint is not None or request.is_flat:
            raise MessageError("the master sends only rows of parameters that are on several pservers")
        width = width_of(spec)
        rows = require_range(spec.name, request.start, request.stop, spec.size // width)
        if len(rows) * width > MAX_WIDTH:
            raise MessageError("the master sends single rows: read the others from the pservers")
        about = {"job": self._job, "cut": _cut(None, request.cut)}
        schema = parameter_schema(spec, rows.start, about, request.columns)
        columns = []
        for each in row_ranges(plan, spec, rows):
            columns += [self._elements(request, plan, *part) for part in each.parts]
        flat = pa.concat_arrays([chunk for column in columns for chunk in column])
        kind = schema.field(0).type
        column = pa.FixedSizeListArray.from_arrays(flat, type=kind) if pa.types.is_fixed_size_list(kind) else flat
        return Answer(schema, [pa.RecordBatch.from_arrays([column], schema=schema)], b"")

    def _elements(self, request: ReadTicket, plan: ShardPlan, owner: int, start: int, stop: int) -> list[pa.Array]:
        ticket = replace(request, plan_hash=plan.hash, start=start, stop=stop, columns=None, is_flat=True)
        with (
            self._connection(owner) as connection,
            connection.get(encode(ticket), timeout_s=_READ_S) as stream,
        ):
            return [batch.column(0) for batch, _ in stream if batch is not None]


def _bucket_ranges(plan: ShardPlan, rows: range) -> Iterator[tuple[int, int, int]]:
    """Yield (owner, first bucket, bucket after the last one)."""
    for owner in range(plan.pserver_count):
        buckets = plan.buckets_of(owner)
        start, stop = (end - plan.block_count for end in (buckets.start, buckets.stop))
        yield owner, max(start, rows.start), min(stop, rows.stop)


def _parameter_ranges(
    plan: ShardPlan, spec: ParameterSpec, rows: range, *, is_saved: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (server, first row, row after the last one) in order."""
    if not is_saved:
        for start, stop, parts in row_ranges(plan, spec, rows):
            yield parts[0].pserver if len(parts) == 1 else _MASTER, start, stop
        return
    # Any pserver can read all files.
    count = plan.pserver_count
    cuts = [rows.start + len(rows) * place // count for place in range(count + 1)]
    for owner, (start, stop) in enumerate(pairwise(cuts)):
        yield owner, start, stop


def _cut(checkpoint: int | None, cut: CutNumber | None) -> str:
    if cut is not None:
        return cut_name(cut)
    return "latest" if checkpoint is None else f"checkpoint {checkpoint}"


def _spec_of(plan: ShardPlan, request: ReadCommand) -> ParameterSpec | TableSpec:
    if request.kind != "table" and request.name in plan.numbers_by_name:
        return plan.parameters[plan.numbers_by_name[request.name]]
    if request.kind != "parameter":
        for table in plan.tables:
            if table.name == request.name:
                return table
    raise NotFoundError(f"the model has no {request.name!r:.80}: ListFlights names its parameters and tables")
