"""The pserver's verbs: decode, call the service, encode.

``step`` (DoExchange) is push and pull in one stream: each message of rows is answered by one message that says what
became of them, together with the values that can leave already; after the last row the values of blocks whose round
closes within ``wait_s`` follow. ``push`` (DoPut) and ``pull`` (DoGet) are the same apart, for any Flight client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from flightedl.errors import MessageError
from flightedl.ports import Clock
from flightedl.pserver.service import PserverService
from flightedl.pserver.shard import Pushed, ShardState
from flightedl.rpc.routes import Call, ExchangeRoute, Outgoing, PutRoute, Routes
from flightedl.rpc.streams import Exchange, Incoming
from flightedl.wire.messages import (
    InitHeader,
    InitReply,
    PullTicket,
    PushHeader,
    PushReply,
    SnapshotRequest,
    ViewRequest,
    decode,
    encode,
)
from flightedl.wire.rows import PUSH_SCHEMA, VALUES_SCHEMA, Outcome, decode_rows, encode_rows, group_by_size

_SLICE_S = 0.25
_ANSWERED = frozenset({Outcome.ACCEPTED, Outcome.ALREADY_APPLIED})


class PserverFlight:
    """Routes of one pserver."""

    def __init__(self, service: PserverService, clock: Clock) -> None:
        self._service = service
        self._clock = clock

    def routes(self) -> Routes:
        """All verbs."""
        return Routes(
            actions={
                "view": self._view,
                "status": self._status,
                "snapshot": lambda body, _: encode(self._service.snapshot(decode(body, SnapshotRequest))),
                "applied": lambda _body, _: encode(self._service.applied()),
            },
            gets={"pull": self._pull},
            puts={"push": PutRoute(PUSH_SCHEMA, self._push), "init": PutRoute(PUSH_SCHEMA, self._init)},
            exchanges={"step": ExchangeRoute(PUSH_SCHEMA, self._step)},
        )

    def _view(self, body: bytes, _: Call) -> bytes:
        return encode(self._service.take_view(decode(body, ViewRequest)))

    def _status(self, _body: bytes, _: Call) -> bytes:
        return encode(self._service.status())

    def _init(self, descriptor: bytes, incoming: Incoming, _: Call) -> bytes:
        header = decode(descriptor, InitHeader)
        shard = self._service.shard_for_init(header.plan_hash)
        count = 0
        for batch, _metadata in incoming:
            for row in decode_rows(batch):
                shard.initialize(header.election, row)
                count += 1
        if count != header.rows:
            raise MessageError(f"{header.rows} rows were announced, {count} came")
        self._service.look_at_election()
        return encode(InitReply(initialized=shard.initialized_count(header.election), blocks=shard.block_count))

    def _push(self, descriptor: bytes, incoming: Incoming, _: Call) -> bytes:
        header = decode(descriptor, PushHeader)
        shard = self._service.shard(header.plan_hash)
        counts = dict.fromkeys(Outcome, 0)
        for batch, _metadata in incoming:
            for row in decode_rows(batch):
                counts[shard.push(header, row).outcome] += 1
            shard.announce_changes()
        return encode(
            PushReply(
                accepted=counts[Outcome.ACCEPTED],
                already_applied=counts[Outcome.ALREADY_APPLIED],
                stale=counts[Outcome.STALE],
                not_member=counts[Outcome.NOT_MEMBER],
            )
        )

    def _step(self, descriptor: bytes, exchange: Exchange, call: Call) -> None:
        header = decode(descriptor, PushHeader)
        shard = self._service.shard(header.plan_hash)
        wanted: dict[int, int] = {}
        exchange.begin(VALUES_SCHEMA)
        while (message := exchange.read()) is not None:
            if message[0] is not None:
                exchange.write(self._take_rows(shard, header, message[0], wanted))
        deadline = min(self._clock.now() + header.wait_s, call.deadline)
        for batch in self._values(shard, header.member, wanted, deadline, call):
            exchange.write(batch)

    @staticmethod
    def _take_rows(
        shard: ShardState, header: PushHeader, batch: pa.RecordBatch, wanted: dict[int, int]
    ) -> pa.RecordBatch:
        """Push the rows of one message; their outcomes, with what values can leave now."""
        answers: dict[int, Pushed] = {}
        for row in decode_rows(batch):
            answers[row.block] = pushed = shard.push(header, row)
            if header.pull and pushed.values is None and pushed.outcome in _ANSWERED:
                wanted[row.block] = shard.version_after(row.version)
        shard.announce_changes()
        budget = batch.nbytes - sum(p.values.nbytes for p in answers.values() if p.values is not None)
        for block in list(wanted):
            if budget <= 0:
                break
            if (ready := shard.read(block, header.member, wanted[block])) is not None:
                del wanted[block]
                answers[block] = _merged(answers.get(block), ready)
                budget -= 0 if ready.values is None else ready.values.nbytes
        return _encoded(answers)

    def _pull(self, ticket: bytes, call: Call) -> Outgoing:
        request = decode(ticket, PullTicket)
        shard = self._service.shard(request.plan_hash)
        blocks = shard.numbers if request.blocks is None else request.blocks
        if len(request.min_versions) not in {1, len(blocks)}:
            raise MessageError(f"{len(blocks)} blocks, but {len(request.min_versions)} min_versions")
        lowest = request.min_versions * len(blocks) if len(request.min_versions) == 1 else request.min_versions
        wanted = dict(zip(blocks, lowest, strict=True))
        deadline = min(self._clock.now() + request.wait_s, call.deadline)
        batches = self._values(shard, request.member, wanted, deadline, call)
        return Outgoing(VALUES_SCHEMA, ((batch, None) for batch in batches))

    def _values(
        self, shard: ShardState, member: int, wanted: dict[int, int], deadline: float, call: Call
    ) -> Iterator[pa.RecordBatch]:
        """Values of the wanted blocks as their versions are reached, until the deadline."""
        seen = -1
        while wanted:
            seen = shard.wait_for_change(seen, min(_SLICE_S, deadline - self._clock.now()))
            ready = [block for block, version in wanted.items() if shard.is_readable(block, member, version)]
            for group in group_by_size([shard.size_bytes(block) for block in ready]):
                answers = {
                    ready[i]: read
                    for i in group
                    if (read := shard.read(ready[i], member, wanted[ready[i]])) is not None
                }
                for block in answers:
                    del wanted[block]
                if answers:
                    yield _encoded(answers)
            if self._clock.now() >= deadline:
                return
            call.check()


def _merged(pushed: Pushed | None, read: Pushed) -> Pushed:
    """The answer to a row together with its block's values; a lost membership outweighs."""
    if pushed is None or read.outcome == Outcome.NOT_MEMBER:
        return read
    return Pushed(pushed.outcome, read.version, read.values)


def _encoded(answers: Mapping[int, Pushed]) -> pa.RecordBatch:
    return encode_rows(
        list(answers),
        [answer.version for answer in answers.values()],
        [answer.values for answer in answers.values()],
        [answer.outcome for answer in answers.values()],
    )
