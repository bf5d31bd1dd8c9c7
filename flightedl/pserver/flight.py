"""The pserver's verbs: decode, call the service, encode.

``step`` (DoExchange) is push and pull in one stream: its first message brings the request, each message of rows is
answered by one message that says what became of them, together with the values that can leave already; after the last
row the values of blocks whose round closes within ``wait_s`` follow. The last message says that the step is over, and
another step may come on the stream.
``push`` (DoPut) and ``pull`` (DoGet) are the same apart, for any Flight client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from flightedl.domain.exactly_once.accumulation import lacking_of
from flightedl.errors import MessageError
from flightedl.messages.base import decode, encode
from flightedl.messages.control import AppliedRequest, ReloadRequest, SealRequest, SnapshotRequest, ViewRequest
from flightedl.messages.parameters import InitHeader, InitReply, Outcome, PullTicket, PushHeader, PushReply
from flightedl.ports import Clock
from flightedl.pserver.service import PserverService
from flightedl.pserver.shard import ShardState, Wanted
from flightedl.rpc.authentication import Role
from flightedl.rpc.routes import Call, ExchangeRoute, Outgoing, PutRoute, Routes
from flightedl.rpc.streams import Exchange, Incoming
from flightedl.wire.parts import STEP_END, STEP_SCHEMA, Part, attached_to, decode_parts, encode_parts
from flightedl.wire.rows import (
    PUSH_SCHEMA,
    TARGET_BYTES,
    VALUES_SCHEMA,
    Piece,
    decode_batch,
    decode_rows,
    encode_pieces,
)

_SLICE_S = 0.25
#: Blocks whose values are not there yet, after which no others are looked for.
_LOOK_AHEAD = 4

_ROLES = {
    **dict.fromkeys(("push", "init", "step"), (Role.TRAINER,)),
    **dict.fromkeys(("view", "snapshot", "applied", "reload", "seal"), (Role.SERVER,)),
    "pull": (Role.TRAINER, Role.READER, Role.ADMIN),
    "status": tuple(Role),
}


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
                "applied": lambda body, _: encode(self._service.applied(decode(body, AppliedRequest))),
                "reload": self._reload,
                "seal": self._seal,
            },
            gets={"pull": self._pull},
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
            shard.counts.messages += 1
            for pushed in shard.push_rows(header, decode_batch(batch, incoming.columns)):
                counts[Outcome(pushed.piece.outcome)] += len(pushed.piece.blocks)
                if pushed.piece.outcome == Outcome.PARTLY_APPLIED and pushed.piece.values is not None:
                    bits = pushed.piece.values[: pushed.piece.offsets[1]].tobytes()
                    lacking.update(lacking_of(bits, 1 + len(header.further)))
            shard.changes.announce()
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
        exchange.begin(STEP_SCHEMA)
        while self._has_taken_step(exchange, call):
            pass

    def _has_taken_step(self, exchange: Exchange, call: Call) -> bool:
        """One step; False: the client wants no more of them."""
        message = exchange.read_at_rest()
        if message is None:
            return False
        call.check_begin()
        batch, packed = message
        del message
        if batch is None:
            raise MessageError("a step begins with a message that has values and a header")
        parts = decode_parts(batch, packed, exchange.columns)
        del batch
        header = decode(attached_to(packed), PushHeader)
        shard = self._service.shard(header.plan_hash)
        waiting: deque[Wanted] = deque()
        left = header.rows
        while True:
            self._service.require_lease()
            left -= sum(len(part.blocks) for part in parts)
            if left < 0:
                raise MessageError(f"{header.rows} rows were announced, {-left} more came")
            pieces = self._take_parts(shard, header, parts, waiting)
            is_over = not left and not waiting
            exchange.write(*encode_parts(pieces, STEP_END if is_over else b""))
            # The next message is to come into this one's memory, while that is in the processor's cache. And of values
            # that somebody holds, others' gradients make a copy first.
            del parts, pieces
            if not left:
                break
            parts = self._next_parts(header, left, exchange)
        if not is_over:
            deadline = min(self._clock.now() + header.wait_s, call.deadline)
            for pieces in self._values(shard, header.member, waiting, deadline, call):
                exchange.write(*encode_parts(pieces))
            exchange.write_metadata(STEP_END)
        return True

    @staticmethod
    def _next_parts(header: PushHeader, left: int, exchange: Exchange) -> list[Part]:
        """Those of the next message of a step."""
        batch, packed = exchange.read() or (None, None)
        if batch is None:
            raise MessageError(f"{header.rows} rows were announced, {left} of them did not come")
        parts = decode_parts(batch, packed, exchange.columns)
        if attached_to(packed):
            raise MessageError(f"a step begins before the one before it ended: {left} of its rows did not come")
        return parts

    @staticmethod
    def _take_parts(
        shard: ShardState, header: PushHeader, parts: Sequence[Part], waiting: deque[Wanted]
    ) -> list[Piece]:
        """Push what one message carries; the outcomes, with about as many values as came, of those that can leave."""
        shard.counts.messages += 1
        pushed = shard.push(header, parts)
        shard.changes.announce()
        pieces = [one.piece for one in pushed]
        budget = sum(len(part.data) for part in parts) - sum(piece.size_bytes for piece in pieces) if waiting else 0
        while waiting and budget > 0:
            # Rounds close in about the order in which their rows come: what is not there yet stops the search.
            ready, rest = shard.read(waiting[0], header.member)
            pieces.extend(ready)
            budget -= sum(piece.size_bytes for piece in ready)
            waiting.popleft()
            if rest:
                waiting.extendleft(reversed(rest))
                break
        waiting.extend(one.wanted for one in pushed if one.wanted is not None)
        return pieces

    def _pull(self, ticket: bytes, call: Call) -> Outgoing:
        request = decode(ticket, PullTicket)
        shard = self._service.shard(request.plan_hash)
        blocks = shard.numbers if request.blocks is None else request.blocks
        if len(request.min_versions) not in {1, len(blocks)}:
            raise MessageError(f"{len(blocks)} blocks, but {len(request.min_versions)} min_versions")
        waiting = deque(shard.wanted(blocks, request.min_versions))
        deadline = min(self._clock.now() + request.wait_s, call.deadline)
        found = self._values(shard, request.member, waiting, deadline, call)
        return Outgoing(VALUES_SCHEMA, ((encode_pieces(pieces), None) for pieces in found))

    def _values(
        self, shard: ShardState, member: int, waiting: deque[Wanted], deadline: float, call: Call
    ) -> Iterator[list[Piece]]:
        """Values as their versions are reached, a message's worth at a time, until the deadline."""
        seen = -1
        while waiting:
            known, seen = seen, shard.changes.wait(seen, min(_SLICE_S, deadline - self._clock.now()))
            # Rounds close in about the order in which their rows came: a few that are not there yet stop the search.
            # When nothing has changed for a while there is time to look at all.
            patience = len(waiting) if known in {-1, seen} else _LOOK_AHEAD
            pieces: list[Piece] = []
            missing: list[Wanted] = []
            while waiting and len(missing) < patience:
                ready, rest = shard.read(waiting.popleft(), member)
                missing.extend(rest)
                if pieces and sum(piece.size_bytes for piece in (*pieces, *ready)) > TARGET_BYTES:
                    yield pieces
                    pieces = []
                pieces.extend(ready)
            waiting.extendleft(reversed(missing))
            if pieces:
                yield pieces
            if self._clock.now() >= deadline:
                return
            if not pieces or call.closing.is_set():
                call.check()
