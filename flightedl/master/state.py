"""Driver of the master's core: passes events to it under a lock, carries out effects, and stores its state in etcd.

The lock is never held during I/O. An event changes the core's state under the lock. The effects are carried out after
:class:`~flightedl.master.durable.DurableState` has stored that state. Threads that handle requests wait for their
answers in this module.

``lock`` guards the core and all fields, except those that are set only once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flightedl.config import MasterSettings
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.domain.master import effects as out
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.effects import Kind
from flightedl.domain.master.events import (
    Asked,
    DatasetIndexed,
    Event,
    FilesJoined,
    Request,
    WaitEnded,
)
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.queue.values import Effect as QueueEffect
from flightedl.domain.queue.values import EpochFinished, Expired, Quarantined, QueueSettings
from flightedl.domain.queue.values import FailedPiece as Failed
from flightedl.domain.recovery.store_history import Sighting
from flightedl.errors import FlightedlError, NotReadyError
from flightedl.master.durable import DurableState
from flightedl.master.evaluations import EvaluationDatasets
from flightedl.master.failures import failed_piece
from flightedl.master.indexing import IndexedDataset
from flightedl.master.journal import Journal
from flightedl.master.metrics import REQUEST_SECONDS
from flightedl.master.progress import JobProgress
from flightedl.messages.base import encode
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.declarations import DatasetDeclaration, EvaluationDeclaration, ModelDeclaration
from flightedl.messages.groups import GroupLeaveRequest, GroupPlaceRequest, GroupStartRequest
from flightedl.messages.moving import MovedRequest
from flightedl.messages.scaling import ScaleRequest
from flightedl.messages.tasks import (
    DroppedTasksRequest,
    FailedTasksRequest,
    JoinRequest,
    ModeRequest,
    StopRequest,
    TasksTicket,
)
from flightedl.ports import Clock, Coordinator, Instruments, NoInstruments
from flightedl.recording.recorded import recorded
from flightedl.recording.writer import Recorder

_log = logging.getLogger(__name__)

#: Seconds that a request waits for etcd before the trainer has to repeat the request.
_DURABLE_S = 3.0
#: Seconds to pause before waiting for etcd again.
_DURABLE_PAUSE_S = 0.1
#: Polling interval, in seconds, of waiting requests, which check if the server is closing.
_LOOK_S = 0.5

#: Names of requests in metrics.
_REQUESTS: Mapping[type, str] = {
    TasksTicket: "work",
    JoinRequest: "join",
    ModeRequest: "mode",
    CheckpointRequest: "checkpoint",
    FailedTasksRequest: "failed_work",
    DroppedTasksRequest: "failed_work",
    StopRequest: "stop",
    GroupStartRequest: "group_start",
    GroupPlaceRequest: "group_at",
    GroupLeaveRequest: "group_leave",
    ModelDeclaration: "model",
    DatasetDeclaration: "dataset",
    EvaluationDeclaration: "evaluation",
    ScaleRequest: "scale",
    MovedRequest: "scale",
}

#: Carries out all effects except answers.
Carry = Callable[[out.Effect], None]


class _Slot:
    """Slot for the answer to a request. A thread waits for it."""

    def __init__(self) -> None:
        self.is_answered = threading.Event()
        self.reply: Any = None
        self.revision = 0


class JobState:
    """State of one job on one master."""

    def __init__(
        self,
        chosen: MasterSettings,
        pserver_count: int,
        generation: int,
        coordinator: Coordinator,
        keys: JobKeys,
        clock: Clock,
        evaluation_datasets: EvaluationDatasets,
        *,
        keeps_checkpoints: bool,
        recorder: Recorder | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        self.clock = clock
        self.instruments = NoInstruments() if instruments is None else instruments
        self.journal = Journal(generation, clock)
        #: Generation of a pserver -> name of its process, for events about pservers with another name.
        self.processes: dict[object, str] = {}
        self.pserver_count = pserver_count
        self._queue_settings = queue_settings_of(chosen)
        self._coordinator = coordinator
        self._keys = keys
        self.lock = threading.RLock()
        self._settings = CoreSettings(
            generation=generation,
            pserver_count=pserver_count,
            trainer_count=chosen.trainers,
            recovery="rollback" if chosen.recovery == "rollback" else "replay",
            checkpoints=settings_of(chosen),
            keeps_checkpoints=keeps_checkpoints,
            attempts_limit=chosen.attempts_limit,
            rebalance_s=chosen.rebalance_s,
        )
        self._recorder = recorder
        #: An empty core until ``recover``.
        self.core = MasterCore(self._settings, clock.now())
        self.dataset: IndexedDataset | None = None
        #: Number of the dataset's arrivals that are known to be in etcd.
        self.arrivals_saved = 0
        #: Problem with the files of a followed dataset; empty if there is none.
        self.dataset_alarm = ""
        #: See ``StatusReply.names_left_out``; of a followed dataset.
        self.names_left_out: tuple[str, ...] = ()
        self.progress = JobProgress()
        self.evaluation_datasets = evaluation_datasets
        #: Set once, before the first event.
        self.carry: Carry = lambda _: None
        self._slots: dict[int, _Slot] = {}
        self._call_count = 0
        self._durable: DurableState | None = None

    def recover(self, stored: StoredState, dataset: IndexedDataset | None, arrivals_saved: int = 0) -> None:
        """Start from a predecessor's state. ``dataset`` is the index of the dataset declared in that state.

        Raises:
            UsageError: the stored queue belongs to different tasks.
            FencedError: a newer master stored the state.
        """
        tasks = None if dataset is None else self._tasks_of(dataset)
        with self.lock:
            self.core = recorded(self._recorder, {}, MasterCore, self._settings, self.clock.now(), stored, tasks)
            self.dataset, self.arrivals_saved = dataset, arrivals_saved
        text = "a master has taken over generation=%d; earlier events are in the previous master's log"
        self._note(Kind.MASTER_LEADS, "master", text, self._settings.generation)

    def _tasks_of(self, dataset: IndexedDataset) -> QueueSettings:
        declared = dataset.reply.declaration
        return self._queue_settings(
            task_count=dataset.layout.task_count,
            batch_counts=dataset.layout.batch_count,
            epochs=declared.epochs,
            seed=declared.seed,
            shuffle=declared.shuffle,
            follow=declared.follow,
        )

    # events

    def apply(self, event: Event, carry: Carry | None = None, then: Callable[[], None] = lambda: None) -> None:
        """Apply an event and carry out its effects. The caller must not hold the lock.

        Args:
            event: The event.
            carry: Receives the next call to a pserver.
            then: Called after the core has handled the event, before the lock is released.
        """
        with self.lock:
            effects = self.core.apply(event, self.clock.now())
            then()
        self._carry_out(effects, carry)

    def declare(self, declaration: Request, begin: Callable[[], object]) -> Any:
        """Answer a declaration, as ``ask`` does. If the declaration is new, call ``begin`` and ask again."""
        reply = self.ask(declaration)
        if isinstance(reply, out.Undeclared):
            begin()
            reply = self.ask(declaration)
        return reply

    def ask(self, request: Request, closing: threading.Event | None = None, *, is_last: bool = False) -> Any:
        """Return the answer to a request once the answer is durable. The caller must not hold the lock.

        Waits for at most the request's ``wait_s``, if the request has that field. For ``is_last`` see ``Asked``.

        Raises:
            FlightedlError: the answer is an error.
            NotReadyError: etcd cannot be written. The request may be repeated.
        """
        slot = _Slot()
        with self.lock:
            self._call_count += 1
            call = self._call_count
            self._slots[call] = slot
        began = self.clock.now()
        try:
            self.apply(Asked(call, request, is_last))
            is_answered_at_once = slot.is_answered.is_set()
            deadline = self.clock.now() + getattr(request, "wait_s", 0.0)
            while not slot.is_answered.is_set() and not (closing is not None and closing.is_set()):
                remaining = deadline - self.clock.now()
                if remaining <= 0 or slot.is_answered.wait(min(remaining, _LOOK_S)):
                    break
            if not slot.is_answered.is_set():
                self.apply(WaitEnded(call))
                # Another thread may have triggered the answer, which then arrives soon.
                if not slot.is_answered.wait(_DURABLE_S):
                    raise NotReadyError("the master is busy: try again")
        finally:
            with self.lock:
                del self._slots[call]
        if isinstance(slot.reply, FlightedlError):
            raise slot.reply
        self.wait_durable(slot.revision)
        if is_answered_at_once:
            self.instruments.observe(REQUEST_SECONDS, self.clock.now() - began, _REQUESTS[type(request)])
        return slot.reply

    def _carry_out(self, effects: list[out.Effect], carry: Carry | None = None) -> None:
        # Deliver answers first, because other effects may take a long time or fail.
        for effect in effects:
            if isinstance(effect, out.Answer) and (slot := self._slots.get(effect.call)) is not None:
                slot.reply, slot.revision = effect.reply, effect.revision
                slot.is_answered.set()
        for effect in effects:
            match effect:
                case out.Answer():
                    pass
                case out.Note(text, values, kind, who, is_warning):
                    self._note(kind, who, text, *values, is_warning=is_warning)
                case out.QueueNews(evaluation, news):
                    self._note_news(evaluation, news)
                case out.ControlCall() | out.NoCallDue() if carry is not None:
                    carry(effect)
                case _:
                    self.carry(effect)

    def _note_news(self, evaluation: str, effect: QueueEffect) -> None:
        match effect:
            case EpochFinished(epoch):
                self._note(Kind.EPOCH_DONE, "", "epoch is done epoch=%d", epoch + 1)
            case Expired(trainer, a, reason):
                text = "taking back a task and the trainer's backlog epoch=%d task=%d trainer=%s: because %s"
                self._note(Kind.WORK_EXPIRED, trainer, text, a.epoch + 1, a.task, trainer, reason, is_warning=True)
            case Quarantined(piece):
                self._note_quarantined(evaluation, piece)

    def _note_quarantined(self, evaluation: str, piece: Failed) -> None:
        with self.lock:
            dataset = self.evaluation_datasets.dataset(evaluation) if evaluation else self.dataset
            work = None if evaluation else self.core.work
            seed = None if work is None else work.queue.seed_of(piece.epoch)
        if dataset is None:
            return
        found = failed_piece(piece, dataset, seed)
        self._note(
            Kind.WORK_QUARANTINED,
            found.trainer,
            "batches were quarantined epoch=%d task=%d batches=%d-%d url=%s chunk=%d records=%d-%d "
            "trainer=%s attempts=%d error=%s",
            found.epoch + 1,
            found.task,
            found.first_batch,
            found.end_batch - 1,
            found.url,
            found.chunk,
            found.first_record,
            found.first_record + found.records - 1,
            found.trainer,
            found.attempts,
            found.error,
            is_warning=True,
        )

    def _note(self, kind: Kind, who: str, text: str, *values: object, is_warning: bool = False) -> None:
        if kind in {Kind.PSERVER_CAME, Kind.PSERVER_GONE} and (process := self.processes.get(values[-1], who)) != who:
            text, values = f"{text} process=%s", (*values, process)
        _log.log(logging.WARNING if is_warning else logging.INFO, text, *values)
        self.journal.add(kind, who, text % values, is_warning=is_warning)

    # the training data

    def begin_dataset(self, dataset: IndexedDataset) -> None:
        """Give the job an indexed dataset unless it already has one. The caller must not hold the lock.

        Raises:
            UsageError: the dataset has no tasks.
        """

        def keep() -> None:
            if self.dataset is None:
                self.dataset = dataset

        self.apply(DatasetIndexed(dataset.reply, self._tasks_of(dataset)), then=keep)

    def grow_dataset(self, dataset: IndexedDataset) -> None:
        """Replace the dataset with a larger one that has the same task numbers. The caller must not hold the lock."""

        def keep() -> None:
            self.dataset = dataset

        self.apply(FilesJoined(dataset.layout.task_count, dataset.layout.batch_count), then=keep)

    # durability

    def start_writing(
        self, held: HeldKey, known: Mapping[str, tuple[bytes, int]], step_down: Callable[[str], None]
    ) -> None:
        self._durable = DurableState(
            held, self._coordinator, self.clock, self._snapshot, step_down, known, self.instruments
        )

    def close(self) -> None:
        if self._durable is not None:
            self._durable.close()

    def wait_durable(self, revision: int) -> None:
        """Wait until the state with this revision is in etcd. The caller must not hold the lock.

        Raises:
            NotReadyError: etcd cannot be written. The request may be repeated.
        """
        if revision:
            assert self._durable is not None
            self._durable.wait(revision, _DURABLE_S)

    def becomes_durable(self, is_ending: Callable[[], bool], revision: int | None = None) -> bool:
        """Wait until a revision (by default the current one) is in etcd. Return False if this master ends first.

        Called without the lock.
        """
        if revision is None:
            with self.lock:
                revision = self.core.revision
        while not is_ending():
            try:
                self.wait_durable(revision)
            except NotReadyError:
                self.clock.sleep(_DURABLE_PAUSE_S)
            else:
                return True
        return False

    def store(self) -> None:
        """Wait until the current state is in etcd. The caller must not hold the lock.

        Raises:
            NotReadyError: etcd cannot be written.
        """
        with self.lock:
            revision = self.core.revision
        self.wait_durable(revision)

    def stored_at(self, key: str) -> int:
        """Return the revision at which a key of the state was last written."""
        return 0 if self._durable is None else self._durable.stored_at(key)

    def _snapshot(self) -> tuple[int, dict[str, bytes]]:
        keys = self._keys
        names = keys.of_state
        with self.lock:
            values = {names[name]: value for name, value in self.core.encode().items()}
            if self.dataset is not None:
                for number in range(self.arrivals_saved, len(self.dataset.arrivals)):
                    values[keys.arrival(number)] = encode(self.dataset.arrivals[number])
            return self.core.revision, values

    def sighting(self) -> Sighting | None:
        return self._coordinator.sighting()


def queue_settings_of(chosen: MasterSettings) -> Callable[..., QueueSettings]:
    """Return a function that creates queue settings, which include this process's limits."""
    return partial(
        QueueSettings,
        attempts_limit=chosen.attempts_limit,
        timeout_factor=chosen.task_timeout_factor,
        timeout_floor_s=chosen.task_timeout_floor_s,
        stuck_after_s=chosen.stuck_after_s,
        stand_still_s=chosen.stand_still_s,
    )


def settings_of(chosen: MasterSettings) -> CheckpointSettings:
    """Return this process's settings for checkpoints."""
    return CheckpointSettings(
        interval_s=chosen.checkpoint_every_s or None,
        interval_tasks=chosen.checkpoint_every_tasks or None,
        keep=chosen.checkpoint_keep,
        keep_every=chosen.checkpoint_keep_every or None,
        increments=chosen.checkpoint_increments,
    )
