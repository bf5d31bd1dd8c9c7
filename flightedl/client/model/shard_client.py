"""Client of one pserver: sends requests, receives answers, and reconnects after a restart of the pserver.

A step is a lock-step exchange on a stream that stays open between steps (``step_channel``). If some blocks' round is
still open when the exchange ends, the client requests their values in further exchanges, each with a short timeout. The
blocks of a run (``runs_of``) are adjacent in memory and share a message. The rows of tables follow in a message after
the blocks; a lookup sends only that message (``client.tables``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from msgspec.json import encode

from flightedl.client.connections import Servers
from flightedl.client.model.step_channel import LOCK_STEP_LIMIT_BYTES, StepChannel, StepStream
from flightedl.client.model.step_plan import Outgoing, Piece, at_one_version
from flightedl.client.model.values import ModelValues
from flightedl.client.probe import PULL, PUSH, WAIT
from flightedl.client.tables.traffic import RowMessages
from flightedl.client.waiting import Conversation, Waiting
from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.trainer.steps import Steps
from flightedl.domain.trainer.transfers import (
    Answer,
    AskAgain,
    Call,
    KeepWaiting,
    Over,
    Push,
    Refused,
    Transfer,
    Verdict,
    or_moved,
)
from flightedl.errors import FlightedlError, MessageError, StalePlacementError
from flightedl.messages.parameters import LookupHeader, Outcome, PullTicket, PushHeader
from flightedl.ports import Clock
from flightedl.process import tracing
from flightedl.rpc.client import Connection
from flightedl.wire.parts import PARTS_LIMIT, STEP_END, ReceivedBlocks, parts_of
from flightedl.wire.rows import OutgoingBlocks, decode_batch

if TYPE_CHECKING:
    from flightedl.client.participation import Participation

_SLICE_S = 2.0
_STREAM_S = 30.0
_NONE, _PARTLY_APPLIED = Outcome.NONE, Outcome.PARTLY_APPLIED


class ShardClient:
    """Client of one pserver.

    Args:
        index: Index of the pserver.
        runs: The pserver's blocks, grouped by message; see ``runs_of``.
        plan: The model's shard plan.
        values: The model's values in this trainer.
        servers: Finds the process that holds the index.
        sender: Identity of this trainer.
        waiting: Begins a wait that is reported to the user.
        clock: Clock for the deadlines of streams.
        steps: Receives the answers.
        is_newest: Returns True if a plan's hash belongs to the newest known placement.
        before: The client of the same pserver in the previous layout, whose stream is kept.
    """

    def __init__(
        self,
        index: int,
        runs: Sequence[range],
        plan: ShardPlan,
        values: ModelValues,
        servers: Servers,
        sender: Participation,
        waiting: Callable[[], Waiting],
        clock: Clock,
        steps: Steps,
        is_newest: Callable[[str], bool],
        before: ShardClient | None = None,
    ) -> None:
        self._index = index
        self._steps = steps
        self._is_newest = is_newest
        #: Block -> number of the run that contains it. The blocks are in ascending order.
        self._run_of = {number: run for run, blocks in enumerate(runs) for number in blocks}
        self._plan_hash = plan.hash
        self._placement = plan.placement
        self._values = values
        #: In the trainer's state machine, one block with the first bucket's number represents all buckets.
        self._buckets = plan.buckets_of(index)
        self._servers = servers
        self._sender = sender
        self._waiting = waiting
        sizes = [values.sent_bytes(run) for run in runs]
        largest = max(sizes, default=1)
        #: Maximum number of unanswered messages.
        self.window = max(2, LOCK_STEP_LIMIT_BYTES // max(largest, 1))
        #: Carries one step after another.
        self.channel: StepChannel
        if before is not None and before.window <= self.window:
            self.window, self.channel = before.window, before.channel
        else:
            self.channel = StepChannel(
                index, clock, step_bytes=sum(sizes), ahead=self.window, gradients=lambda: values.gradients
            )
        #: Times of the newest transfer.
        self.conversation: Conversation = Conversation(index, clock.now) if before is None else before.conversation

    def close(self) -> None:
        self.channel.close_idle()

    def connect(self) -> None:
        """Open the connection to a new pserver, so that the first step does not have to."""
        with contextlib.suppress(FlightedlError):
            self._servers.pserver(self._index)[1].action("status", b"", timeout_s=_SLICE_S)

    def carry_out(self, call: Call | None, transfer: Transfer, outgoing: Outgoing) -> None:
        """Carry out this pserver's part of a transfer. Retry until it is complete or the error is final."""
        times = self.conversation
        if call is None:
            times.seconds = {}
            return
        times.begin(PUSH if isinstance(call, Push) else WAIT if next(iter(call.wanted.values()), 0) > 0 else PULL)
        if tracing.tracer is None:
            self._converse(call, transfer, outgoing)
        else:
            with tracing.span("transfer", pserver=self._index):
                self._converse(call, transfer, outgoing)

    def _converse(self, call: Call, transfer: Transfer, outgoing: Outgoing) -> None:
        times = self.conversation
        try:
            verdict = self._attempt(call, transfer, outgoing)
            if not isinstance(verdict, Over):
                self._persist(verdict, transfer, outgoing)
        finally:
            times.asked_at = None
            if times.waiting is not None:
                times.waiting.over()
                times.waiting = None
            times.turn("")

    def _attempt(self, call: Call, transfer: Transfer, outgoing: Outgoing) -> Verdict:
        """Make one call to the process that currently holds the pserver's index."""
        index, handle_answers = self._index, self._steps.handle_answers
        answers: list[Answer] = []
        generation = 0
        try:
            generation, connection = self._servers.pserver(index)
            if transfer.batch is None:
                self._sender.require_final(index, generation)
            if isinstance(call, Push):
                self._push(call, answers, transfer, outgoing, connection)
            else:
                self._read(call.wanted, answers, transfer, outgoing.rows, connection)
        except BaseException as error:  # noqa: BLE001 - earlier answers count whatever the error is
            moved = or_moved(error, is_newest=self._is_newest(self._plan_hash))
            return handle_answers(transfer.serial, index, generation, answers, moved)
        return handle_answers(transfer.serial, index, generation, answers)

    def _persist(self, verdict: Verdict, transfer: Transfer, outgoing: Outgoing) -> None:
        times = self.conversation
        # If the first attempt took long, it has already been reported as a wait.
        waiting = times.waiting = times.waiting or self._waiting()
        if times.asked_at is not None:
            waiting.since(times.asked_at)
        try:
            while not isinstance(verdict, Over):
                if times.phase == PUSH:
                    times.turn(WAIT)
                match verdict:
                    case Refused(final):
                        raise final
                    case AskAgain(reason, call):
                        waiting.because(reason)
                    case KeepWaiting(for_what, call):
                        waiting.patiently(for_what)
                waiting.pause()
                verdict = self._attempt(call, transfer, outgoing)
        finally:
            waiting.over()

    # A push sends gradients, and receives their outcomes and new values.

    def _push(
        self, push: Push, answers: list[Answer], transfer: Transfer, outgoing: Outgoing, connection: Connection
    ) -> None:
        batch, blocks = transfer.batch, push.blocks
        assert batch is not None, "a push needs a batch"
        if self.conversation.phase != PUSH:
            self.conversation.turn(PUSH)
        has_rows = blocks[-1] in self._buckets
        header = PushHeader(
            trainer=self._sender.trainer,
            generation=self._sender.generation,
            plan_hash=self._plan_hash,
            member=transfer.member,
            identity=batch.identity,
            further=list(batch.others),
            step=batch.step,
            weight=float(batch.weight),
            rows=len(blocks) + (len(self._buckets) - 1 if has_rows else 0),
            pull=transfer.pull_after_push,
            wait_s=_SLICE_S,
            traceparent="" if tracing.tracer is None else tracing.carried(),
            checksums=connection.has_checksums,
        )
        numbers = blocks[:-1] if has_rows else blocks
        wanted = None if len(numbers) == len(self._run_of) else frozenset(numbers)
        messages: Iterable[Sequence[OutgoingBlocks]]
        runs = outgoing.plan.pieces[self._index]
        if len(runs) == 1:
            # Usually, there is only one run. A list tells ``_exchange`` that there is only one message.
            messages = self._messages_of(runs[0], push.bases, wanted, outgoing)
        else:
            messages = chain.from_iterable(self._messages_of(run, push.bases, wanted, outgoing) for run in runs)
        if has_rows:
            pull, found = transfer.pull_after_push, outgoing.rows
            payload = None if found is None else found.pushed(self._index, pull=pull)
            rows = OutgoingBlocks(self._buckets, push.bases[blocks[-1]], _NONE, payload, ())
            messages = chain(messages, [[rows]])
        self._exchange(messages, encode(header), answers, outgoing.rows, connection)

    def _messages_of(
        self, run: Sequence[Piece], bases: Mapping[int, int], wanted: Collection[int] | None, outgoing: Outgoing
    ) -> list[list[OutgoingBlocks]]:
        """Return messages for the blocks in ``wanted``, or for all blocks of a run if ``wanted`` is None."""
        pieces: list[OutgoingBlocks] = []
        values = self._values
        for blocks, number, elements in run:
            gradient = None if number is None else outgoing.lines[number]
            if elements is not None and gradient is not None:
                gradient = gradient[elements]
            if wanted is None and len(set(map(bases.__getitem__, blocks))) == 1:
                if gradient is not None and values.shortens:
                    gradient = values.outgoing(gradient, blocks, blocks)
                pieces.append(OutgoingBlocks(blocks, bases[blocks.start], _NONE, gradient, ()))
                continue
            for part in at_one_version(blocks, bases, wanted):
                sent = None if gradient is None else values.outgoing(gradient, blocks, part)
                pieces.append(OutgoingBlocks(part, bases[part.start], _NONE, sent, ()))
        if len(pieces) <= PARTS_LIMIT:
            return [pieces] if pieces else []
        return [pieces[start : start + PARTS_LIMIT] for start in range(0, len(pieces), PARTS_LIMIT)]

    def _exchange(
        self,
        messages: Iterable[Sequence[OutgoingBlocks]],
        request: bytes,
        answers: list[Answer],
        rows: RowMessages | None,
        connection: Connection,
    ) -> None:
        """Send the messages, the first of which contains the request, and receive the answers."""
        if rows is not None:
            rows.begin(self._index)
        checksums, times = connection.has_checksums, self.conversation
        stream = self.channel.begin(connection, timeout_s=_STREAM_S)
        try:
            is_one = isinstance(messages, list) and len(messages) == 1
            said = b""
            for pieces in messages if is_one else stream.joined(messages):
                stream.send(pieces, request, checksums=checksums)
                request = b""
                while not is_one and stream.is_full and said != STEP_END:
                    said = self._receive(stream, answers, rows)
                if said == STEP_END:
                    break
            while said != STEP_END:
                if answers and times.phase == PUSH and stream.is_answered:
                    times.turn(WAIT)
                said = self._receive(stream, answers, rows)
        except BaseException as error:
            self.channel.end(stream, error)
            raise
        self.channel.end(stream)

    def _receive(self, stream: StepStream, answers: list[Answer], rows: RowMessages | None) -> bytes:
        """Receive the next answer and store its content. Return the bytes attached to it."""
        parts, said = stream.receive()
        self._store_parts(parts, answers, stream, rows)
        return said

    # reading

    def _read(
        self,
        wanted: Mapping[int, int],
        answers: list[Answer],
        transfer: Transfer,
        rows: RowMessages | None,
        connection: Connection,
    ) -> None:
        """Pull blocks and look up table rows. If no row ids are given, fetch only the version of the tables."""
        blocks = {number: version for number, version in wanted.items() if number not in self._buckets}
        if blocks:
            self._pull(blocks, answers, transfer.member, connection)
        if len(blocks) < len(wanted):
            payload = None if rows is None else rows.asked(self._index)
            header = LookupHeader(
                plan_hash=self._plan_hash,
                member=transfer.member,
                wait_s=_SLICE_S,
                checksums=connection.has_checksums,
            )
            version = wanted[self._buckets.start]
            message = [OutgoingBlocks(self._buckets, version, _NONE, payload, ())]
            self._exchange([message], encode(header), answers, rows, connection)

    def _store_rows(self, part: ReceivedBlocks, answers: list[Answer], rows: RowMessages | None) -> None:
        """Record the answers for buckets, and store their rows, if any."""
        blocks, version, outcome, data = part.blocks, part.version, part.outcome, part.data
        if blocks.stop > self._buckets.stop:
            raise self._foreign(blocks)
        if outcome == _PARTLY_APPLIED:
            answers.append(Answer(blocks.start, blocks.stop, outcome, None, data.tobytes()))
        elif data:
            if self.conversation.phase == WAIT:
                self.conversation.turn(PULL)
            if rows is not None:
                rows.take(self._index, blocks, version, data)
            answers.append(Answer(blocks.start, blocks.stop, outcome, version))
        else:
            answers.append(Answer(blocks.start, blocks.stop, outcome))

    def _pull(self, wanted: Mapping[int, int], answers: list[Answer], member: int, connection: Connection) -> None:
        blocks = sorted(wanted)
        versions = [wanted[number] for number in blocks]
        has_one_version = len(set(versions)) == 1
        # After blocks have moved, a pserver may hold blocks that this trainer still expects on another pserver.
        is_everything = has_one_version and len(blocks) == len(self._run_of) and self._placement <= 1
        ticket = PullTicket(
            plan_hash=self._plan_hash,
            member=member,
            blocks=None if is_everything else blocks,
            min_versions=versions[:1] if has_one_version else versions,
            wait_s=_SLICE_S,
        )
        with connection.get(encode(ticket), timeout_s=_STREAM_S) as stream:
            for batch, _ in stream:
                if batch is not None:
                    self._store_parts(parts_of(decode_batch(batch), self._run_of), answers)

    # answers

    def _foreign(self, blocks: range) -> FlightedlError:
        text = f"pserver {self._index} sent {blocks}, which it does not own"
        return StalePlacementError(text) if self._placement else MessageError(text)

    def _store_parts(
        self,
        parts: Iterable[ReceivedBlocks],
        answers: list[Answer],
        stream: StepStream | None = None,
        rows: RowMessages | None = None,
    ) -> None:
        """Store the values that arrived on ``stream``, and record the answers."""
        for part in parts:
            blocks, version, outcome, data = part.blocks, part.version, part.outcome, part.data
            if blocks.start in self._buckets:
                self._store_rows(part, answers, rows)
                continue
            run = self._run_of.get(blocks[0])
            if run is None or self._run_of.get(blocks[-1]) != run:
                raise self._foreign(blocks)
            if data and self.conversation.phase == WAIT:
                self.conversation.turn(PULL)
            if outcome == _PARTLY_APPLIED:
                having = data[: len(data) // len(blocks)].tobytes()
                answers.append(Answer(blocks.start, blocks.stop, outcome, None, having))
            elif data:
                self._values.store(blocks, data)
                if stream is not None and stream.is_borrowing:
                    stream.require_lent()
                answers.append(Answer(blocks.start, blocks.stop, outcome, version))
            else:
                answers.append(Answer(blocks.start, blocks.stop, outcome))
