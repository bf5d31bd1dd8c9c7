"""Driver of ``domain.moving.server``: reads placement and intent, sends leaving units, and stages arriving units.

Theory of operation. One lock guards the core. The effects of each read of etcd are carried out under this lock, in
order. One thread sends the leaving units, one after the other, as ``domain.moving.sender`` decides. Uploads of other
pservers are handled by the server's threads. Another thread repeats the acknowledgements to the master until a
read shows that the attempt is over.

While a unit is frozen or acknowledged, this pserver applies no new view, because the state that it has sent contains
the members of the current view. It also begins no cut, because blocks cannot leave or arrive during a cut. An order may
arrive after the master has abandoned its checkpoint and begun a move.

Limitation: a move may fail. If a message fails, or a frozen unit is not committed in time, the source deletes the
intent. The unit then stays on the source, frozen until a read confirms the deletion. Without etcd, it remains frozen.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from flightedl.domain.moving.sender import EDGE_S, Do, LeavingUnit, Step, UnitSender
from flightedl.domain.moving.server import MovingBlocks, State
from flightedl.domain.moving.values import Acknowledged, Adopt, Copy, Discard, Effect, End, Last, Release, Thaw, Update
from flightedl.errors import CorruptError, FlightedlError, NotReadyError
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import Placement
from flightedl.messages.moving import MoveHeader, MoveReply
from flightedl.ports import Clock
from flightedl.pserver.moving import parcels
from flightedl.pserver.moving.arrival import Arrival
from flightedl.pserver.moving.departure import Departure
from flightedl.pserver.moving.parcels import SCHEMA, Digest, Parcel
from flightedl.pserver.moving.peers import Peers, Reading
from flightedl.pserver.shard import Shard
from flightedl.rpc.streams import Incoming

_log = logging.getLogger(__name__)

_COPY_S = 3600.0
_FROZEN_S = 5.0
_ACKNOWLEDGE_S = 0.05
#: Seconds between the removals of two buckets that have moved away.
_DISCARD_PAUSE_S = 0.002


class Mover:
    """Moves of one shard's blocks. Thread-safe.

    Args:
        index: Index of the pserver.
        generation: Generation of the pserver's process.
        state: State of the blocks that the process has loaded.
        shard: The shard.
        peers: Access to etcd and to the other processes.
        clock: Clock for deadlines.
        placed: Called with a newer placement when the shard has all blocks that the placement assigns to this pserver.
        end: Ends the process, for the given reason.
    """

    def __init__(
        self,
        index: int,
        generation: int,
        state: State,
        shard: Shard,
        peers: Peers,
        clock: Clock,
        placed: Callable[[Placement], None],
        end: Callable[[str], None],
    ) -> None:
        self._index, self._generation = index, generation
        self._core = MovingBlocks(index, generation, state)
        self._shard = shard
        self._peers = peers
        self._clock = clock
        self._placed = placed
        self._end = end
        #: Guards the core and all fields below. Notified after each read.
        self._changed = threading.Condition()
        self._leaving: deque[LeavingUnit] = deque()
        #: First block of each frozen unit whose state has been sent.
        self._pinned: set[int] = set()
        #: Used only by the thread that sends the leaving units.
        self._sender = UnitSender()
        #: First block of a unit -> its staged content.
        self._arrivals: dict[int, Arrival] = {}
        self._acknowledged: dict[int, Acknowledged] = {}
        self._is_closed = False
        self._threads: dict[str, threading.Thread] = {}

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_discarding(self) -> bool:
        """True while memory still contains rows that now belong to another pserver. A checkpoint would include them."""
        return self._shard.rows.has_leftovers

    @contextlib.contextmanager
    def no_unit_is_pinned(self) -> Iterator[None]:
        """Prevent units from being frozen or acknowledged while the ``with`` block applies a view or begins a cut.

        Raises:
            NotReadyError: A unit is frozen or acknowledged.
        """
        with self._changed:
            if self._pinned or self._acknowledged:
                raise NotReadyError("blocks are about to move: send the request again")
            yield

    @property
    def is_empty(self) -> bool:
        """True if all blocks are on other pservers."""
        return not self._core.state.blocks

    # reading etcd

    def look(self) -> None:
        """Read the placement and the intent, and carry out the resulting effects."""
        with self._changed:
            reading = self._peers.read(self._index)
            if reading is None or self._is_closed:
                return
            before = self._core.state.version
            try:
                with self._shard.placing:
                    for effect in self._core.read(*reading):
                        self._carry_out(effect, reading)
                    if self._core.state.version != before:
                        self._placed(reading.placement)
            except Exception as error:
                # The core assumes that all effects were carried out. The blocks might have no owner.
                self._end(f"a move of blocks failed: {error!r:.500}")
                raise
            self._changed.notify_all()

    def _carry_out(self, effect: Effect, reading: Reading) -> None:
        match effect:
            case Copy():
                self._leaving.append(LeavingUnit.of(effect, reading.stored))
                self._have_thread("leaving", self._send_all)
            case Release(block, count):
                numbers = range(block, block + count)
                self._shard.drop(numbers)
                self._thaw(numbers)
                if self.is_discarding:
                    self._have_thread("discarding", self._discard)
                _log.info("released blocks=%d..%d version=%d", block, block + count - 1, reading.placement.version)
            case Thaw(block):
                self._thaw(range(block, block + 1))
                _log.warning("the move of block %d was given up", block)
            case Adopt(block):
                self._acknowledged.pop(block, None)
                self._arrivals.pop(block).adopt()
                self._shard.thaw(range(block, block + 1))
                _log.info("adopted block=%d version=%d", block, reading.placement.version)
            case Discard(block):
                self._acknowledged.pop(block, None)
                self._shard.thaw(range(block, block + 1))
                arrival = self._arrivals.pop(block, None)
                if arrival is not None:
                    arrival.drop()
            case End():
                self._end("its blocks have changed in etcd while it did not have them")

    def _thaw(self, numbers: range) -> None:
        self._shard.thaw(numbers)
        self._pinned.difference_update(numbers)

    def _have_thread(self, name: str, run: Callable[[], None]) -> None:
        thread = self._threads.get(name)
        if thread is None or not thread.is_alive():
            self._threads[name] = threading.Thread(target=run, name=f"flightedl-{name}", daemon=True)
            self._threads[name].start()

    def _discard(self) -> None:
        while True:
            with self._changed:
                if not self.is_discarding or self._is_closed:
                    del self._threads["discarding"]
                    return
            self._shard.rows.discard_some()
            self._clock.sleep(_DISCARD_PAUSE_S)

    # units that leave

    def _send_all(self) -> None:
        while True:
            with self._changed:
                if not self._leaving or self._is_closed:
                    del self._threads["leaving"]
                    return
                leaving = self._leaving.popleft()
                if not self._core.is_leaving(leaving.copy):
                    continue
            self._send(leaving)

    def _send(self, leaving: LeavingUnit) -> None:
        """Send the content of a unit, and freeze it. Returns once a read of etcd shows that the attempt is over."""
        sender, clock, block = self._sender, self._clock, leaving.copy.block
        departure, digest = Departure(self._shard, leaving.numbers), Digest()
        sender.begin(clock.now())
        try:
            while (step := self._next_step(leaving, departure)).do is not Do.END:
                try:
                    if self._is_done(step, leaving, departure, digest):
                        sender.done(clock.now())
                except (FlightedlError, MemoryError) as error:
                    if sender.failed(clock.now(), may_repeat=isinstance(error, NotReadyError)):
                        _log.warning("block %d cannot move to pserver %d: %s", block, leaving.destination, error)
        finally:
            departure.end()
        frozen_s = sender.frozen_s(clock.now())
        _log.info("ended the move of block=%d copied_s=%.3f frozen_s=%.3f", block, sender.copied_s, frozen_s)

    def _next_step(self, leaving: LeavingUnit, departure: Departure) -> Step:
        changed_rows = departure.changed_rows if self._sender.may_update and departure.size_bytes else 0
        with self._changed:
            is_leaving = self._core.is_leaving(leaving.copy) and not self._is_closed
            return self._sender.next_step(self._clock.now(), is_leaving=is_leaving, changed_rows=changed_rows)

    def _is_done(self, step: Step, leaving: LeavingUnit, departure: Departure, digest: Digest) -> bool:
        """Carry out a step. Return False if it has to be repeated, or if the attempt is over."""
        copy = leaving.copy
        match step.do:
            case Do.COPY:
                self._upload(leaving, copy, departure.copy(), digest, departure.size_bytes)
            case Do.UPDATE | Do.REST:
                with self._changed:
                    update = self._core.updated(copy.block) if self._core.is_leaving(leaving.copy) else None
                if update is None:
                    return False
                is_frozen = step.do is Do.REST
                content = departure.rest() if is_frozen else departure.copy()
                self._upload(leaving, update, content, digest, timeout_s=_FROZEN_S if is_frozen else _COPY_S)
            case Do.FREEZE:
                return self._freeze(leaving)
            case Do.LAST:
                with self._changed:
                    last = (
                        self._core.freeze(copy.block, digest.text.encode())
                        if self._core.is_leaving(leaving.copy)
                        else None
                    )
                if last is None:
                    return False
                self._upload(leaving, last, (), digest, timeout_s=_FROZEN_S)
            case Do.GIVE_UP:
                self._give_up(leaving)
            case _:
                self._wait_while_leaving(leaving, step.until)
                return False
        return True

    def _freeze(self, leaving: LeavingUnit) -> bool:
        """Freeze a unit if it is between two rounds; otherwise wait for a change."""
        seen = self._shard.changes.count
        with self._changed:
            if self._is_closed or not self._core.is_leaving(leaving.copy):
                return False
            if self._shard.freeze(leaving.numbers):
                self._pinned.add(leaving.copy.block)
                return True
        self._shard.changes.wait(seen, EDGE_S)
        return False

    def _upload(
        self,
        leaving: LeavingUnit,
        message: Copy | Update | Last,
        content: Iterable[Parcel],
        digest: Digest,
        size_bytes: int = 0,
        timeout_s: float = _COPY_S,
    ) -> None:
        header = MoveHeader(
            kind="copy" if isinstance(message, Copy) else "update" if isinstance(message, Update) else "last",
            attempt=message.attempt,
            block=message.block,
            count=message.count if isinstance(message, Copy) else 0,
            generation=message.generation,
            number=message.number if isinstance(message, Update) else message.count,
            digest=message.digest.decode() if isinstance(message, Last) else "",
            size_bytes=size_bytes,
        )

        def batches() -> Iterator[tuple[parcels.Batch, bytes]]:
            for parcel in content:
                batch, metadata = parcels.encode(parcel)
                digest.update(batch.columns, metadata)
                yield batch, metadata

        connection = self._peers.pserver(leaving.destination, message.generation)
        reply = connection.put(encode(header), SCHEMA, batches(), timeout_s=timeout_s)
        if problem := decode(reply, MoveReply).problem:
            raise NotReadyError(problem)

    def _wait_while_leaving(self, leaving: LeavingUnit, deadline: float) -> None:
        with self._changed:
            while self._core.is_leaving(leaving.copy) and not self._is_closed:
                left_s = deadline - self._clock.now()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def _give_up(self, leaving: LeavingUnit) -> None:
        """End the attempt to move a unit, unless it is already over."""
        block = leaving.copy.block
        with self._changed:
            transaction = self._core.give_up(block) if self._core.is_leaving(leaving.copy) else None
        if transaction is not None:
            try:
                self._peers.give_up(transaction)
            except FlightedlError as error:
                _log.warning("block %d stays frozen until etcd can be reached: %s", block, error)
        self.look()

    # units that arrive

    def receive(self, header: MoveHeader, incoming: Incoming) -> MoveReply:
        """Handle an upload from another pserver.

        Raises:
            CorruptError: The content does not belong to the unit.
            BusyError, MemoryError: There is not enough memory for the content.
        """
        try:
            match header.kind:
                case "copy":
                    self._receive_copy(header, incoming)
                case "update":
                    self._receive_update(header, incoming)
                case "last":
                    self._receive_last(header)
        except NotReadyError as error:
            return MoveReply(problem=str(error))
        return MoveReply()

    def _receive_copy(self, header: MoveHeader, incoming: Incoming) -> None:
        numbers = range(header.block, header.block + header.count)
        arrival = Arrival(self._shard, numbers, header.size_bytes)
        with self._changed:
            copy = Copy(header.attempt, header.block, header.generation, header.count)
            if self._core.received(copy) is None:
                raise NotReadyError("the copy belongs to an attempt that is over, or to another process")
            before = self._arrivals.get(header.block)
            self._arrivals[header.block] = arrival
        if before is not None:
            before.drop()
        _stage(arrival, incoming)

    def _receive_update(self, header: MoveHeader, incoming: Incoming) -> None:
        with self._changed:
            update = Update(header.attempt, header.block, header.generation, header.number)
            arrival = self._arrivals.get(header.block)
            if arrival is None or self._core.received(update) is None:
                raise NotReadyError("the update belongs to an attempt that is over, or is repeated")
        _stage(arrival, incoming)

    def _receive_last(self, header: MoveHeader) -> None:
        block = header.block
        last = Last(header.attempt, block, header.generation, header.number, header.digest.encode())
        with self._changed:
            arrival = self._arrivals.get(block)
            if arrival is None:
                raise NotReadyError("nothing of these blocks has arrived")
            with arrival.lock:
                arrival.prepare()
                acknowledged = self._core.received(last, arrival.digest.text.encode())
            if not isinstance(acknowledged, Acknowledged):
                arrival.drop()
                raise NotReadyError("some of the content has not arrived, or the attempt is over")
            self._acknowledged[block] = acknowledged
            self._shard.approach(range(block, block + 1))
            self._have_thread("acknowledging", self._acknowledge)

    def _acknowledge(self) -> None:
        while True:
            with self._changed:
                acknowledged = list(self._acknowledged.values())
                if not acknowledged or self._is_closed:
                    del self._threads["acknowledging"]
                    return
            for each in acknowledged:
                try:
                    self._peers.acknowledge(each, self._generation)
                except FlightedlError as error:
                    _log.debug("block %d is acknowledged again later: %s", each.block, error)
            with self._changed:
                if acknowledged == list(self._acknowledged.values()):
                    self._changed.wait(_ACKNOWLEDGE_S)


def _stage(arrival: Arrival, incoming: Incoming) -> None:
    for batch, metadata in incoming:
        if batch is None:
            raise CorruptError("a part of a moving block has no content")
        with arrival.lock:
            arrival.digest.update(batch.columns, metadata)
            arrival.add(parcels.decode(batch.columns, metadata))
