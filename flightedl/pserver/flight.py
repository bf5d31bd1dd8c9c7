"""The pserver's verbs: decode, call the service, encode.

``step`` (DoExchange) is push and pull in one stream (see ``steps``): its first message brings the request, each message
is answered by one, and the last message says that the step is over; another step may come on the stream. So may a
lookup of rows, which is one message and its answer. What messages travel by is the business of ``step_stream``.
``push`` (DoPut) and ``pull`` (DoGet) are the same apart, for any Flight client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from flightedl.domain.exactly_once.accumulation import lacking_of
from flightedl.errors import MessageError, UsageError
from flightedl.messages.base import decode, encode
from flightedl.messages.control import AppliedRequest, ReloadRequest, SealRequest, SnapshotRequest, ViewRequest
from flightedl.messages.parameters import (
    InitHeader,
    InitReply,
    LookupHeader,
    Opening,
    Outcome,
    PullTicket,
    PushHeader,
    PushReply,
    TableTicket,
)
from flightedl.messages.status import StacksReply
from flightedl.ports import Clock
from flightedl.process import tracing
from flightedl.process.stacks import stacks
from flightedl.pserver.service import PserverService
from flightedl.pserver.step_stream import StepStream
from flightedl.pserver.steps import StepSession, awaited_values
from flightedl.rpc.authentication import Role
from flightedl.rpc.routes import Call, ExchangeRoute, Outgoing, PutRoute, Routes
from flightedl.rpc.streams import Exchange, Incoming
from flightedl.wire.parts import STEP_END, STEP_SCHEMA, ReceivedBlocks
from flightedl.wire.rows import PUSH_SCHEMA, VALUES_SCHEMA, OutgoingBlocks, decode_batch, decode_rows, encode_pieces

_ROLES = {
    **dict.fromkeys(("push", "init", "step", "table"), (Role.TRAINER,)),
    **dict.fromkeys(("view", "snapshot", "applied", "reload", "seal"), (Role.SERVER,)),
    "stacks": (Role.ADMIN,),
    "pull": (Role.TRAINER, Role.READER, Role.ADMIN),
    "status": tuple(Role),
}


class PserverFlight:
    """Routes of one pserver.

    Args:
        service: Answers.
        clock: For waits.
        shares_memory: Whether trainers of the same host may have memory in common with it.
    """

    def __init__(self, service: PserverService, clock: Clock, *, shares_memory: bool = True) -> None:
        self._service = service
        self._clock = clock
        self._shares_memory = shares_memory

    def routes(self) -> Routes:
        """All verbs."""
        return Routes(
            actions={
                "view": self._view,
                "status": self._status,
                "stacks": lambda _body, _: encode(StacksReply(text=stacks())),
                "snapshot": lambda body, _: encode(self._service.snapshot(decode(body, SnapshotRequest))),
                "applied": lambda body, _: encode(self._service.applied(decode(body, AppliedRequest))),
                "reload": self._reload,
                "seal": self._seal,
            },
            gets={"pull": self._pull, "table": self._table},
            puts={"push": PutRoute(PUSH_SCHEMA, self._push), "init": PutRoute(PUSH_SCHEMA, self._init)},
            exchanges={"step": ExchangeRoute(STEP_SCHEMA, self._step)},
            roles=_ROLES,
        )

    def _view(self, body: bytes, _: Call) -> bytes:
        return encode(self._service.take_view(decode(body, ViewRequest)))

    def _reload(self, body: bytes, _: Call) -> bytes:
        self._service.reload(decode(body, ReloadRequest))
        return b"{}"

    def _seal(self, body: bytes, _: Call) -> bytes:
        self._service.seal(decode(body, SealRequest))
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
            raise MessageError(f"{header.rows} rows were announced, {count} came")
        initialized, blocks = self._service.first_values_came(header.election)
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
                    lacking.update(lacking_of(bits, 1 + len(header.further)))
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

    def _step(self, _: bytes, exchange: Exchange, call: Call) -> None:
        stream = StepStream(
            exchange,
            call,
            self._clock,
            self._service.meter,
            lambda: self._service.store,
            shares_memory=self._shares_memory,
        )
        stream.begin()
        try:
            while self._has_taken_step(stream, call):
                pass
        finally:
            stream.end()

    def _has_taken_step(self, stream: StepStream, call: Call) -> bool:
        """One step; False: the client wants no more of them."""
        received = stream.request()
        if received is None:
            return False
        call.check_begin()
        parts, request = received
        del received
        began = self._clock.now()
        header = _opened(request)
        if isinstance(header, LookupHeader):
            self._lookup(header, parts, stream, call)
            return True
        shard = self._service.shard(header.plan_hash)
        stream.serves(header.member)
        with tracing.serves("pserver", "step", header.traceparent):
            self._take_step(StepSession(shard, header), parts, stream, call, header)
        shard.meter.step(self._clock.now() - began)
        return True

    def _take_step(
        self, session: StepSession, parts: list[ReceivedBlocks], stream: StepStream, call: Call, header: PushHeader
    ) -> None:
        checksums = header.checksums
        while True:
            self._service.require_lease()
            pieces = session.feed(parts)
            if session.is_over:
                stream.write(pieces, STEP_END, checksums=checksums)
                return
            stream.write(pieces, checksums=checksums)
            # The next message is to come into this one's memory, while that is in the processor's cache. And of values
            # that somebody holds, others' gradients make a copy first.
            del parts, pieces
            if session.has_all:
                break
            parts = self._next_parts(session, stream)
        deadline = min(self._clock.now() + header.wait_s, call.deadline)
        for pieces in _while_wanted(session.drain(self._clock, deadline), call):
            # A word of its own costs as much as the message before it.
            stream.write(pieces, STEP_END if session.is_over else b"", checksums=checksums, may_wait=True)
        if not session.is_over:
            stream.write_word(STEP_END)

    def _lookup(self, header: LookupHeader, parts: Sequence[ReceivedBlocks], stream: StepStream, call: Call) -> None:
        """Rows of tables: what is there leaves with the word that this is all."""
        shard = self._service.shard(header.plan_hash)
        if len(parts) != 1:
            raise MessageError(f"a lookup is about the buckets of a pserver, and has {len(parts)} parts")
        pieces, rest = shard.read(shard.lookup(parts[0]), header.member)
        if pieces or not rest:
            stream.write(pieces, b"" if rest else STEP_END, checksums=header.checksums)
        if rest:
            deadline = min(self._clock.now() + header.wait_s, call.deadline)
            waiting = deque(rest)
            found = awaited_values(shard, header.member, waiting, self._clock, deadline)
            for more in _while_wanted(found, call):
                stream.write(more, b"" if waiting else STEP_END, checksums=header.checksums, may_wait=True)
            if waiting:
                stream.write_word(STEP_END)

    @staticmethod
    def _next_parts(session: StepSession, stream: StepStream) -> list[ReceivedBlocks]:
        """Those of the next message of a step."""
        received = stream.read()
        if received is None:
            raise MessageError(session.missing)
        parts, attached = received
        if attached:
            raise MessageError(f"a step begins before the one before it ended: {session.missing}")
        return parts

    def _pull(self, ticket: bytes, call: Call) -> Outgoing:
        request = decode(ticket, PullTicket)
        shard = self._service.shard(request.plan_hash)
        blocks = shard.numbers if request.blocks is None else request.blocks
        if len(request.min_versions) not in {1, len(blocks)}:
            raise MessageError(f"{len(blocks)} blocks, but {len(request.min_versions)} min_versions")
        waiting = deque(shard.wanted(blocks, request.min_versions))
        deadline = min(self._clock.now() + request.wait_s, call.deadline)
        found = awaited_values(shard, request.member, waiting, self._clock, deadline)
        return Outgoing(VALUES_SCHEMA, ((encode_pieces(pieces), None) for pieces in _while_wanted(found, call)))

    def _table(self, ticket: bytes, _: Call) -> Outgoing:
        # Few jobs need it, and what knows Parquet files takes a while to import.
        from flightedl.formats.table_files import batches_of, schema_of

        request = decode(ticket, TableTicket)
        shard = self._service.shard(request.plan_hash)
        if request.table >= len(shard.rows.tables):
            raise MessageError(f"there is no table {request.table}")
        if self._service.keeps_checkpoints:
            raise UsageError("this job keeps checkpoints: its tables are exported from one, by the master")
        spec = shard.rows.tables[request.table]
        batches = batches_of(spec, shard.all_rows(request.table), has_slots=request.slots)
        return Outgoing(schema_of(spec, has_slots=request.slots), ((batch, None) for batch in batches))


def _opened(request: bytes) -> PushHeader | LookupHeader:
    """What a message begins. Nearly always it is a step: to look at the verb first costs as much again."""
    try:
        header = decode(request, PushHeader)
    except MessageError:
        if decode(request, Opening).verb == "lookup":
            return decode(request, LookupHeader)
        raise
    return header if header.verb != "lookup" else decode(request, LookupHeader)


def _while_wanted(found: Iterator[list[OutgoingBlocks]], call: Call) -> Iterator[list[OutgoingBlocks]]:
    """Messages that have something in them, as long as somebody waits for them."""
    for pieces in found:
        if pieces:
            yield pieces
        if not pieces or call.closing.is_set():
            call.check()
