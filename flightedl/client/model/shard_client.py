"""The conversation with one pserver, through its restarts: what a transfer asks of it, and the messages that say so.

A step is a stream of messages in lock-step: a few ahead, then one answer read for each message written, which keeps the
data in the processor's cache and cannot deadlock. The stream is kept open from step to step. In synchronous mode a
block's fresh values come when its round has closed; what has not come by the end of a step is asked for again, in
slices of time.

What lies in one piece of memory is sent as it lies there: the blocks of a run (``runs_of``) travel in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.client.connections import Servers
from flightedl.client.model.values import ModelValues
from flightedl.client.waiting import Waiting
from flightedl.domain.model.sharding import Block
from flightedl.domain.trainer.transfers import AskAgain, KeepWaiting, Over, Pull, Push, Refused, ShardTransfer, Transfer
from flightedl.errors import FlightedlError, MessageError
from flightedl.messages.base import encode
from flightedl.messages.parameters import Outcome, PullTicket, PushHeader
from flightedl.ports import Clock
from flightedl.rpc.client import Connection
from flightedl.rpc.client_streams import LOCK_STEP_LIMIT_BYTES
from flightedl.rpc.reuse import ReusableExchange
from flightedl.wire.parts import (
    PARTS_LIMIT,
    STEP_END,
    STEP_SCHEMA,
    ReceivedBlocks,
    attached_to,
    decode_parts,
    encode_parts,
    parts_of,
)
from flightedl.wire.rows import OutgoingBlocks, decode_batch

Array = npt.NDArray[np.generic]

_SLICE_S = 2.0
_STREAM_S = 30.0
_NO_ARRAYS: Mapping[int, Array] = MappingProxyType({})


class Sender(Protocol):
    """Under whose name a trainer pushes and pulls now."""

    @property
    def trainer(self) -> str: ...

    @property
    def generation(self) -> int: ...

    def require_final(self, index: int, generation: int) -> None:
        """Outside of a batch: after the job's end, raise unless this process of a pserver has all that was trained."""
        ...


class Outgoing(NamedTuple):
    """The gradients of one push. Encoded once: whatever is sent again is the same bytes."""

    #: Block -> the (n,) gradient of its whole parameter. Blocks that are not here get the batch's arrival.
    gradients: Mapping[int, Array] = _NO_ARRAYS
    #: First block of a run -> the (n,) gradients of all its blocks, where they were put together.
    together: Mapping[int, Array] = _NO_ARRAYS


@dataclass(frozen=True, slots=True)
class Model:
    """What all pservers' clients share.

    ``blocks``: by number.
    """

    plan_hash: str
    blocks: Mapping[int, Block]
    values: ModelValues


class ShardClient:
    """The client's side of one pserver.

    Args:
        index: Of the pserver.
        runs: Its blocks that travel in one message, see ``runs_of``.
        model: Which model it is.
        servers: Finds the process that holds the index.
        sender: In whose name.
        waiting: Begins a wait that the user sees.
        clock: For the time of streams.
    """

    def __init__(
        self,
        index: int,
        runs: Sequence[range],
        model: Model,
        servers: Servers,
        sender: Sender,
        waiting: Callable[[], Waiting],
        clock: Clock,
    ) -> None:
        self._index = index
        self._runs = runs
        #: Block -> number of its run, by rising block.
        self._run_of = {number: run for run, blocks in enumerate(runs) for number in blocks}
        self._model = model
        self._servers = servers
        self._sender = sender
        self._waiting = waiting
        largest = max((model.values.sent_bytes(run) for run in runs), default=1)
        #: Messages written ahead of the answers read: two at least.
        self._window = max(2, LOCK_STEP_LIMIT_BYTES // max(largest, 1))
        #: Steps follow each other on it.
        self._stream = ReusableExchange("step", STEP_SCHEMA, clock)

    def close(self) -> None:
        """Let go of the stream."""
        self._stream.close_idle()

    def carry_out(self, transfer: ShardTransfer, whole: Transfer, outgoing: Outgoing) -> None:
        """Until nothing more is asked of this pserver.

        Raises:
            FlightedlError: asking again cannot help.
            UnavailableError: the pserver stayed away for too long.
        """
        if transfer.is_over:
            return
        waiting = self._waiting()
        for _ in waiting.steps():
            try:
                self._call(transfer, whole, outgoing)
            except FlightedlError as error:
                verdict = transfer.failed(error)
            else:
                verdict = transfer.ended()
            match verdict:
                case Over():
                    break
                case Refused(final):
                    waiting.over()
                    raise final
                case AskAgain(reason):
                    waiting.because(reason)
                case KeepWaiting(for_what):
                    waiting.patiently(for_what)
        waiting.over()

    def _call(self, transfer: ShardTransfer, whole: Transfer, outgoing: Outgoing) -> None:
        """Ask the process that holds the index now, once."""
        generation, connection = self._servers.pserver(self._index)
        if whole.current is None:
            self._sender.require_final(self._index, generation)
        match transfer.next_call(generation):
            case Push() as push:
                self._push(push, transfer, whole, outgoing, connection)
            case Pull(wanted):
                self._pull(wanted, transfer, whole.member, connection)

    # a push: blocks up, outcomes and values down

    def _push(
        self, push: Push, transfer: ShardTransfer, whole: Transfer, outgoing: Outgoing, connection: Connection
    ) -> None:
        current = push.current
        header = PushHeader(
            trainer=self._sender.trainer,
            generation=self._sender.generation,
            plan_hash=self._model.plan_hash,
            member=whole.member,
            identity=current.identity,
            further=list(current.further),
            step=current.step,
            weight=float(current.record_count),
            rows=len(push.blocks),
            pull=whole.pull_after_push,
            wait_s=_SLICE_S,
        )
        messages = (found for run in self._by_run(push.blocks) for found in self._messages(run, push.bases, outgoing))
        with self._stream.use(connection, timeout_s=_STREAM_S) as exchange:
            for batch, packed in exchange.lock_step(_encoded(messages, encode(header)), ahead=self._window):
                said = packed
                if batch is not None:
                    self._take(decode_parts(batch, packed, exchange.columns), transfer)
                    said = attached_to(packed)
                    # The next answer is to come into this one's memory, while that is in the processor's cache.
                    del batch
                if said == STEP_END:
                    return

    def _by_run(self, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
        """Rising numbers of blocks, those of a run together."""
        if len(blocks) == len(self._run_of):
            yield from self._runs
            return
        for _, found in groupby(blocks, self._run_of.__getitem__):
            yield list(found)

    def _messages(
        self, blocks: Sequence[int], bases: Mapping[int, int], outgoing: Outgoing
    ) -> Iterator[Sequence[OutgoingBlocks]]:
        """Some blocks of a run, by message."""
        pieces: list[OutgoingBlocks] = []
        for stretch in _at_one_version(blocks, bases, outgoing.gradients):
            for part, gradient in self._joined(stretch, outgoing):
                if len(pieces) == PARTS_LIMIT:
                    yield pieces
                    pieces = []
                pieces.append(OutgoingBlocks(part, bases[part.start], Outcome.NONE, gradient, ()))
        yield pieces

    def _joined(self, blocks: range, outgoing: Outgoing) -> Iterator[tuple[range, Array | None]]:
        """The gradients of neighbouring blocks, of as many as possible together."""
        values, numbered = self._model.values, self._model.blocks
        first, last = numbered[blocks[0]], numbered[blocks[-1]]
        gradient = outgoing.gradients.get(first.number)
        if gradient is None:
            yield blocks, None
        elif first.parameter == last.parameter:
            yield blocks, values.outgoing(gradient[first.start : last.stop])
        elif (joined := outgoing.together.get(first.number)) is not None and joined.nbytes == values.nbytes(blocks):
            yield blocks, values.outgoing(joined)
        else:
            for number in blocks:
                block = numbered[number]
                yield (
                    range(number, number + 1),
                    values.outgoing(outgoing.gradients[number][block.start : block.stop]),
                )

    # a pull

    def _pull(self, wanted: Mapping[int, int], transfer: ShardTransfer, member: int, connection: Connection) -> None:
        blocks = sorted(wanted)
        versions = [wanted[number] for number in blocks]
        is_everything = len(blocks) == len(self._run_of) and len(set(versions)) == 1
        ticket = PullTicket(
            plan_hash=self._model.plan_hash,
            member=member,
            blocks=None if is_everything else blocks,
            min_versions=versions[:1] if is_everything else versions,
            wait_s=_SLICE_S,
        )
        with connection.get(encode(ticket), timeout_s=_STREAM_S) as stream:
            for batch, _ in stream:
                if batch is not None:
                    self._take(parts_of(decode_batch(batch), self._run_of), transfer)

    # answers

    def _take(self, parts: Iterable[ReceivedBlocks], transfer: ShardTransfer) -> None:
        """Store the values that came, and say what was answered."""
        for blocks, version, outcome, data in parts:
            run = self._run_of.get(blocks[0])
            if run is None or self._run_of.get(blocks[-1]) != run:
                raise MessageError(f"pserver {self._index} sent {blocks}, which are not its own")
            if outcome == Outcome.PARTLY_APPLIED:
                transfer.answered(blocks, outcome, having=data[: len(data) // len(blocks)].tobytes())
            elif data:
                self._model.values.store(blocks, data)
                transfer.answered(blocks, outcome, version)
            else:
                transfer.answered(blocks, outcome)


def _encoded(
    messages: Iterable[Sequence[OutgoingBlocks]], request: bytes
) -> Iterator[tuple[pa.RecordBatch, bytes, int]]:
    """The messages of a step, the first of which brings its request."""
    for pieces in messages:
        yield *encode_parts(pieces, request), sum(piece.size_bytes for piece in pieces)
        request = b""


def _at_one_version(
    numbers: Sequence[int], bases: Mapping[int, int], gradients: Mapping[int, Array]
) -> Iterator[range]:
    """Stretches of neighbouring blocks with the same base version, all with a gradient or all without."""
    first, last = numbers[0], numbers[-1]
    if (
        last - first + 1 == len(numbers)
        and len(set(map(bases.__getitem__, numbers))) == 1
        and len(set(map(gradients.__contains__, numbers))) == 1
    ):
        # As nearly always, and a few times faster to find out.
        yield range(first, last + 1)
        return
    start = before = first
    for number in numbers[1:]:
        is_alike = bases[number] == bases[start] and (number in gradients) == (start in gradients)
        if number != before + 1 or not is_alike:
            yield range(start, before + 1)
            start = number
        before = number
    yield range(start, before + 1)
