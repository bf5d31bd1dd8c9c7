"""Carries out what ``domain.checkpoints`` decides: orders to the pservers, the manifest, the pointer, deletions.

Theory of operation. The decisions are taken under the service's lock; the effects go through one queue to one thread,
in their order. ``Persist`` waits until the master's state is in etcd, so nothing after it happens before that; the
pointer itself is part of that state and written by the same fenced transaction. Orders travel on the threads that talk
to the pservers anyway (``errand``), which repeat an order until the file is reported: it is the same request that asks
how far it is.

A store that fails is an alarm in ``status``, and a reason to try again later; it is never a reason for anybody to wait,
but for one: the job is not said to be done before the last checkpoint is complete, so that a pserver which dies while
the trainers read the result still comes back with it. That wait ends when the store has failed several times.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable

from flightedl.config import MasterSettings
from flightedl.domain import checkpoints_manifest
from flightedl.domain.checkpoints import Checkpoints
from flightedl.domain.checkpoints_manifest import Manifest, ShardFile, manifest_name
from flightedl.domain.checkpoints_values import (
    Alarm,
    CheckpointSettings,
    Effect,
    MovePointer,
    OpenRounds,
    OrderNumber,
    OrderSnapshot,
    Persist,
    SnapshotProgress,
    Sweep,
    WriteManifest,
)
from flightedl.errors import FlightedlError, NotReadyError
from flightedl.messages.base import decode, encode
from flightedl.messages.control import SnapshotReply, SnapshotRequest
from flightedl.ports import Clock, Storage
from flightedl.rpc.client import Connection

_log = logging.getLogger(__name__)

_CALL_S = 10.0
#: How often a pserver is asked while it makes a snapshot.
_POLL_S = 0.05
_IDLE_S = 1.0


def settings_of(chosen: MasterSettings) -> CheckpointSettings:
    """What the process was told, as the domain wants it."""
    return CheckpointSettings(
        interval_s=chosen.checkpoint_every_s or None,
        interval_tasks=chosen.checkpoint_every_tasks or None,
        keep=chosen.checkpoint_keep,
        keep_every=chosen.checkpoint_keep_every or None,
    )


class Checkpointing:
    """The checkpoints of one master. Methods marked *locked* are called under the service's lock.

    Args:
        storage: Where manifests go, and what is swept; None: the job keeps no checkpoints.
        checkpoints: The decisions; guarded by ``lock``.
        lock: The service's.
        persist: Returns when the master's state as it is now is durable. NotReadyError: not yet.
        make_manifest: Builds the manifest of the checkpoint that is to be published; called under the lock.
        wake: Wakes the thread that talks to a pserver.
        clock: Measures.
    """

    def __init__(
        self,
        storage: Storage | None,
        checkpoints: Checkpoints,
        lock: threading.Condition,
        persist: Callable[[], None],
        make_manifest: Callable[[Checkpoints], Manifest],
        wake: Callable[[int], None],
        clock: Clock,
    ) -> None:
        self._storage = storage
        self._checkpoints = checkpoints
        self._lock = lock
        self._persist = persist
        self._make_manifest = make_manifest
        self._wake = wake
        self._clock = clock
        #: index -> the order that this pserver has not answered with a file.
        self._orders: dict[int, OrderSnapshot] = {}
        self._effects: queue.SimpleQueue[Effect | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._draining: set[int] = set()
        #: Longest copies and writing of the newest checkpoints, for people.
        self.stalls_s: deque[float] = deque(maxlen=100)
        self._thread = threading.Thread(target=self._run, name="flightedl-checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; what was under way is forgotten."""
        self._is_stopping = True
        self._effects.put(None)
        self._thread.join(5.0)

    # what the service tells and asks, locked

    @property
    def is_kept(self) -> bool:
        """Whether this job keeps checkpoints."""
        return self._storage is not None

    def encode(self) -> bytes:
        """Locked: the state that a successor goes on from."""
        return self._checkpoints.encode()

    def settled(self, index: int, generation: int) -> None:
        """Locked: a pserver serves, and what it has is taken into the queue's account."""
        if self.is_kept:
            self._do(self._checkpoints.pserver_up(index, generation, self._clock.now()))

    def down(self, index: int) -> None:
        """Locked: a pserver is gone, or has to go."""
        self._orders.pop(index, None)
        self._draining.discard(index)
        self._do(self._checkpoints.pserver_down(index, self._clock.now()))

    def tasks_finished(self, count: int) -> None:
        """Locked: so many more tasks are done."""
        self._checkpoints.tasks_finished(count)

    def epoch_finished(self, epoch: int) -> None:
        """Locked: every task of the epoch is done."""
        if self.is_kept:
            self._checkpoints.epoch_finished(epoch)

    def rejected(self, numbers: Collection[int]) -> None:
        """Locked: a pserver could not load these checkpoints."""
        self._checkpoints.rejected(numbers)

    def request(self, reason: str) -> int:
        """Locked: somebody wants a checkpoint; the ticket for ``is_satisfied``."""
        return self._checkpoints.request(reason)

    def request_last(self, reason: str) -> int:
        """Locked: as ``request``, for one that is waited for; the ticket for ``is_over``."""
        return self._checkpoints.request_last(reason)

    def is_over(self, ticket: int) -> bool:
        """Locked: whether a last checkpoint is complete, or the store fails so that nobody waits for it."""
        return self._checkpoints.is_over(ticket)

    def is_satisfied(self, ticket: int) -> bool:
        """Locked: whether the checkpoint that the ticket is for is complete, and its pointer stored."""
        return self._checkpoints.is_satisfied(ticket)

    def is_draining(self, index: int) -> None:
        """Locked: a pserver is about to end and wants a checkpoint first."""
        if self.is_kept and index not in self._draining:
            self._draining.add(index)
            self._checkpoints.request(f"pserver {index} is about to end")

    @property
    def latest(self) -> int:
        """Locked: the newest complete checkpoint; 0: none."""
        latest = self._checkpoints.latest
        return 0 if latest is None else latest.number

    @property
    def may_be_saved(self) -> bool:
        """Locked: whether what a pserver had may be in a checkpoint, now or soon."""
        return self._checkpoints.may_be_saved

    @property
    def trouble(self) -> str:
        """Locked: what keeps checkpoints from being completed; empty: nothing."""
        return self._checkpoints.trouble

    @property
    def age_s(self) -> float | None:
        """Locked: since the last checkpoint was complete; None: none is kept."""
        return self._checkpoints.age_s(self._clock.now()) if self.is_kept else None

    def tick(self, rounds: OpenRounds | None, may_order: bool) -> None:
        """Locked: time has passed. ``may_order``: the model has values, so there is something to copy."""
        if self.is_kept and may_order:
            if self._checkpoints.latest is None and self._checkpoints.under_way is None:
                self._checkpoints.request("the first values")
            self._do(self._checkpoints.tick(self._clock.now(), rounds))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._effects.put(effect)

    # on the threads of the pservers

    def errand(self, index: int, generation: int, connection: Connection, plan_hash: str) -> float:
        """Tell a pserver its order, if it has one; after how many seconds to come again."""
        with self._lock:
            order = self._orders.get(index)
        if order is None or order.generation != generation:
            return _IDLE_S
        snapshot = order.snapshot
        request = SnapshotRequest(
            plan_hash=plan_hash,
            master_generation=snapshot.order.master_generation,
            number=snapshot.order.number,
            serial=snapshot.order.serial,
            round=snapshot.round,
            name=snapshot.name,
        )
        reply = decode(connection.action("snapshot", encode(request), timeout_s=_CALL_S), SnapshotReply)
        progress = _progress(index, generation, reply)
        with self._lock:
            if self._orders.get(index) is order and progress.state in {"written", "failed", "refused"}:
                del self._orders[index]
                if progress.state == "written":
                    self.stalls_s.append(reply.copied_s)
            self._do(self._checkpoints.progressed(index, generation, progress, self._clock.now()))
        return _POLL_S

    # the thread

    def _run(self) -> None:
        while (effect := self._effects.get()) is not None and not self._is_stopping:
            try:
                self._carry_out(effect)
            except Exception:  # noqa: BLE001 - whatever it is, the effects after it still have to be carried out
                _log.exception("an effect of the checkpoints could not be carried out")

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist():
                self._make_durable()
            case OrderSnapshot(index):
                with self._lock:
                    self._orders[index] = effect
                self._wake(index)
            case WriteManifest(number):
                self._write_manifest(number)
            case MovePointer(pointer):
                with self._lock:
                    self._do(self._checkpoints.pointer_moved(pointer.number, self._clock.now()))
                    self._lock.notify_all()
                _log.info("checkpoint complete number=%d", pointer.number)
            case Sweep():
                self._sweep()
            case Alarm(text):
                _log.warning("checkpoints: %s", text)

    def _make_durable(self) -> None:
        while not self._is_stopping:
            try:
                self._persist()
            except NotReadyError:
                self._clock.sleep(_POLL_S)
            else:
                return

    def _write_manifest(self, number: int) -> None:
        storage = self._storage
        assert storage is not None, "there are no checkpoints without a storage"
        with self._lock:
            if self._checkpoints.under_way != number:
                return
            data = self._make_manifest(self._checkpoints).encode()
        try:
            storage.publish(manifest_name(number), [data])
        except Exception as error:  # noqa: BLE001 - whatever a store raises: who waits has to hear that it failed
            with self._lock:
                self._do(self._checkpoints.manifest_failed(number, str(error), self._clock.now()))
        else:
            with self._lock:
                self._do(self._checkpoints.manifest_written(number, checkpoints_manifest.checksum(data)))

    def _sweep(self) -> None:
        storage = self._storage
        assert storage is not None, "there are no checkpoints without a storage"
        try:
            names = [file.name for file in storage.list("")]
            with self._lock:
                going = self._checkpoints.deletable(names)
            for name in going:
                storage.delete(name)
        except FlightedlError as error:
            _log.warning("old checkpoints cannot be deleted at the moment: %s", error)


def _progress(index: int, generation: int, reply: SnapshotReply) -> SnapshotProgress:
    file = reply.file
    states = {"refused", "waiting", "taken", "written", "failed"}
    return SnapshotProgress(
        OrderNumber(reply.master_generation, reply.number, reply.serial),
        reply.state if reply.state in states else "waiting",  # type: ignore[arg-type]
        reply.highest_open_round,
        None
        if file is None
        else ShardFile(
            index=index,
            generation=generation,
            name=file.name,
            size_bytes=file.size_bytes,
            hash=file.hash,
            blocks=file.blocks,
            lowest_version=file.lowest_version,
            highest_version=file.highest_version,
        ),
        reply.reason,
    )
