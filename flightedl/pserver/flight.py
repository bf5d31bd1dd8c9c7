"""Handlers of the pserver's Flight verbs: they decode requests, call the service, and encode replies.

``step`` (DoExchange) pushes and pulls on one stream (see ``steps``). ``push`` (DoPut) and ``pull`` (DoGet) are separate
calls for any Flight client. ``read`` (DoGet) reads parameters and tables as Arrow columns.
"""

from __future__ import annotations

from collections import deque

from flightedl.domain.exactly_once.accumulation import missing_places
from flightedl.errors import MessageError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.control import (
    AppliedRequest,
    CutRequest,
    ReloadRequest,
    SealRequest,
    SnapshotRequest,
    ViewRequest,
)
from flightedl.messages.feed import ChangesTicket
from flightedl.messages.moving import CopyTicket, MoveHeader
from flightedl.messages.parameters import InitHeader, InitReply, Outcome, PullTicket, PushHeader, PushReply, TableTicket
from flightedl.messages.reading import ReadTicket
from flightedl.messages.status import StacksReply
from flightedl.ports import Clock
from flightedl.process.stacks import stacks
from flightedl.pserver.moving.parcels import SCHEMA
from flightedl.pserver.service import PserverService
from flightedl.pserver.steps.conversation import Conversation, while_wanted
from flightedl.pserver.steps.line_loop import LineLoop
from flightedl.pserver.steps.session import awaited_values
from flightedl.pserver.steps.step_stream import StepStream
from flightedl.rpc.authentication import Role
from flightedl.rpc.call import Call
from flightedl.rpc.routes import ExchangeRoute, Outgoing, PutRoute, Routes
from flightedl.rpc.streams import Exchange, Incoming
from flightedl.wire.parts import STEP_SCHEMA
from flightedl.wire.rows import PUSH_SCHEMA, VALUES_SCHEMA, decode_batch, decode_rows, encode_pieces

_ROLES = {
    **dict.fromkeys(("push", "init", "step", "table"), (Role.TRAINER,)),
    **dict.fromkeys(("view", "snapshot", "cut", "applied", "reload", "seal", "move", "copy"), (Role.SERVER,)),
    "stacks": (Role.ADMIN,),
    "pull": (Role.TRAINER, Role.READER, Role.ADMIN),
    "read": tuple(Role),
    "changes": (Role.TRAINER, Role.READER, Role.ADMIN),
    "status": tuple(Role),
}


class PserverFlight:
    """Routes of one pserver.

    Args:
        service: The service that answers requests.
        clock: Clock for waits.
        shares_memory: True if trainers on the same host may use shared memory.
    """

    def __init__(self, service: PserverService, clock: Clock, *, shares_memory: bool = True) -> None:
        self._service = service
        self._clock = clock
        self._shares_memory = shares_memory
        self._lines = LineLoop(clock.now)

    def routes(self) -> Routes:
        """Return the handler of each verb."""
        return Routes(
            actions={
                "view": self._view,
                "status": self._status,
                "stacks": lambda _body, _: encode(StacksReply(text=stacks())),
                "cut": lambda body, _: encode(self._service.cut(decode(body, CutRequest))),
                "snapshot": lambda body, _: encode(self._service.snapshot(decode(body, SnapshotRequest))),
                "applied": lambda body, _: encode(self._service.applied(decode(body, AppliedRequest))),
                "reload": self._reload,
                "seal": self._seal,
            },
            gets={
                "pull": self._pull,
                "table": self._table,
                "read": self._read,
                "changes": self._changes,
                "copy": self._copy,
            },
            puts={
                "push": PutRoute(PUSH_SCHEMA, self._push),
                "init": PutRoute(PUSH_SCHEMA, self._init),
                "move": PutRoute(SCHEMA, self._move),
            },
            exchanges={"step": ExchangeRoute(STEP_SCHEMA, self._step)},
            roles=_ROLES,
        )

    def _view(self, body: bytes, _: Call) -> bytes:
        return encode(self._service.apply_view(decode(body, ViewRequest)))

    def _reload(self, body: bytes, _: Call) -> bytes:
        self._service.reload(decode(body, ReloadRequest))
        return b"{}"

    def _seal(self, body: bytes, _: Call) -> bytes:
        self._service.set_task_counts(decode(body, SealRequest))
        return b"{}"

    def _status(self, _body: bytes, _: Call) -> bytes:
        return encode(self._service.status())

    def _init(self, descriptor: bytes, incoming: Incoming, _: Call) -> bytes:
        header = decode(descriptor, InitHeader)
        shard = self._service.shard_for_init(header.plan_hash, header.election)
        count = 0
        for batch, _metadata in incoming:
            self._service.require_lease()
            for row in decode_rows(batch):
                if shard is not None:
                    shard.initialize(header.election, row)
                count += 1
        if count != header.rows:
            raise MessageError(f"received {count} rows, but {header.rows} were announced")
        initialized, blocks = self._service.first_values_received(header.election)
        return encode(InitReply(initialized=initialized, blocks=blocks))

    def _push(self, descriptor: bytes, incoming: Incoming, _: Call) -> bytes:
        header = decode(descriptor, PushHeader)
        shard = self._service.shard(header.plan_hash)
        counts = dict.fromkeys(Outcome, 0)
        lacking: set[int] = set()
        for batch, _metadata in incoming:
            self._service.require_lease()
            for pushed in shard.push_rows(header, decode_batch(batch, incoming.columns)):
                counts[Outcome(pushed.piece.outcome)] += len(pushed.piece.blocks)
                if pushed.piece.outcome == Outcome.PARTLY_APPLIED and pushed.piece.values is not None:
                    bits = pushed.piece.values[: pushed.piece.offsets[1]].tobytes()
                    lacking.update(missing_places(bits, 1 + len(header.further)))
        return encode(
            PushReply(
                accepted=counts[Outcome.ACCEPTED],
                already_applied=counts[Outcome.ALREADY_APPLIED],
                stale=counts[Outcome.STALE],
                not_member=counts[Outcome.NOT_MEMBER],
                partly_applied=counts[Outcome.PARTLY_APPLIED],
                lacking=sorted(lacking),
            )
        )

    def _copy(self, ticket: bytes, call: Call) -> Outgoing:
        request = decode(ticket, CopyTicket)
        copies, election = self._service.copies(request.plan_hash)
        return copies.copy(request, election, call)

    def _move(self, descriptor: bytes, incoming: Incoming, _: Call) -> bytes:
        return encode(self._service.move(decode(descriptor, MoveHeader), incoming))

    def _step(self, _: bytes, exchange: Exchange, call: Call) -> None:
        service, clock = self._service, self._clock
        stream = StepStream(
            exchange, call, clock, service.meter, lambda: service.store, shares_memory=self._shares_memory
        )
        stream.begin()
        try:
            Conversation(stream, service, clock, call, self._lines).serve()
        finally:
            stream.end()

    def _pull(self, ticket: bytes, call: Call) -> Outgoing:
        request = decode(ticket, PullTicket)
        shard = self._service.shard(request.plan_hash)
        blocks = shard.all_numbers(request.plan_hash) if request.blocks is None else request.blocks
        if len(request.min_versions) not in {1, len(blocks)}:
            raise MessageError(f"{len(blocks)} blocks, but {len(request.min_versions)} min_versions")
        waiting = deque(shard.wanted(blocks, request.min_versions))
        deadline = min(self._clock.now() + request.wait_s, call.deadline)
        found = awaited_values(shard, request.member, waiting, self._clock, deadline)
        return Outgoing(VALUES_SCHEMA, ((encode_pieces(pieces), None) for pieces in while_wanted(found, call)))

    def _read(self, ticket: bytes, _: Call) -> Outgoing:
        request = decode(ticket, ReadTicket)
        return self._service.reading(request.plan_hash).answer(request)

    def _changes(self, ticket: bytes, call: Call) -> Outgoing:
        request = decode(ticket, ChangesTicket)
        # A pserver that was frozen may have been replaced, and its blocks changed elsewhere.
        self._service.require_lease()
        return self._service.feed(request.plan_hash).changes(request, call)

    def _table(self, ticket: bytes, _: Call) -> Outgoing:
        # Imported lazily: Parquet is slow to import, and few jobs need it.
        from flightedl.formats.table_files import batches_of, schema_of

        request = decode(ticket, TableTicket)
        shard = self._service.shard(request.plan_hash)
        if request.table >= len(shard.rows.tables):
            raise MessageError(f"there is no table {request.table}")
        if self._service.keeps_checkpoints:
            raise UsageError("this job keeps checkpoints: its tables are exported from one, by the master")
        spec = shard.rows.tables[request.table]
        batches = batches_of(spec, shard.all_rows(request.table, plan_hash=request.plan_hash), has_slots=request.slots)
        return Outgoing(schema_of(spec, has_slots=request.slots), ((batch, None) for batch in batches))
