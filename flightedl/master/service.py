"""A running master: constructs and starts its components, and passes time and leases to the core.

All components share ``state``, which is guarded by one lock. The directory (leases in etcd) determines which trainers
exist: when a trainer's key disappears, the trainer immediately loses its tasks and its membership.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from flightedl.config import MasterSettings
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.domain.master import effects as out
from flightedl.domain.master.events import LeasesSeen, Request, StatusReceived, TimePassed
from flightedl.errors import FencedError, NotFoundError, NotReadyError
from flightedl.master.beginning import delete_election
from flightedl.master.checkpointing import CheckpointStore
from flightedl.master.declaring import Declaring
from flightedl.master.evaluations import EvaluationDatasets
from flightedl.master.exporting import ModelExports
from flightedl.master.growing import Growing
from flightedl.master.indexing import DatasetIndexing
from flightedl.master.journal import Journal
from flightedl.master.moves import MoveTransactions, read_moves
from flightedl.master.presence import PresenceWatch
from flightedl.master.progress import TrainerProgress, report_every_s
from flightedl.master.pservers import PserverLinks
from flightedl.master.reading import ModelLocations
from flightedl.master.recovery import RecoveredState
from flightedl.master.state import JobState, queue_settings_of
from flightedl.master.status import consumer_status, describe
from flightedl.master.tasks import Tasks
from flightedl.messages.groups import GroupRecord
from flightedl.messages.status import (
    ConsumerStatus,
    EventsReply,
    EventsRequest,
    StacksReply,
    StacksRequest,
    StatusReply,
)
from flightedl.messages.tasks import LogReply, LogRequest
from flightedl.ports import Clock, Coordinator, Files, Instruments, Storage
from flightedl.recording.writer import Recorder
from flightedl.rpc.connector import Connector

_log = logging.getLogger(__name__)

#: Maximum seconds to wait for a trainer's stack traces.
_STACKS_S = 15.0
#: Polling interval, in seconds, of a wait for a trainer's stack traces.
_LOOK_S = 0.1
#: A new master waits this many seconds for the job's keys before it checks that it still holds the lock.
_KEYS_S = 3.0


class MasterService:
    """The components of a master, and the operations that they share. Thread-safe."""

    def __init__(
        self,
        chosen: MasterSettings,
        *,
        pserver_count: int,
        held: HeldKey,
        coordinator: Coordinator,
        directory: Directory,
        keys: JobKeys,
        files: Files,
        checkpoints: Storage | None,
        index_storage: Storage | None,
        clock: Clock,
        connector: Connector,
        step_down: Callable[[str], None],
        stop: threading.Event | None = None,
        recorder: Recorder | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        self.job = chosen.job
        self._settings = chosen
        self._held = held
        self._coordinator = coordinator
        self._moves: MoveTransactions | None = None
        self._directory = directory
        self._step_down = step_down
        #: Returns error code -> number of rejected calls. Set once the server exists.
        self.refusals: Callable[[], dict[str, int]] = dict
        self._looking = threading.Lock()
        self._keys = keys
        state = self._state = JobState(
            chosen,
            pserver_count,
            held.generation,
            coordinator,
            keys,
            clock,
            EvaluationDatasets(lambda: DatasetIndexing(files, clock, index_storage), queue_settings_of(chosen)),
            keeps_checkpoints=checkpoints is not None,
            recorder=recorder,
            instruments=instruments,
        )
        state.carry = self._carry
        self._indexing = DatasetIndexing(files, clock, index_storage, follow_every_s=chosen.follow_every_s, stop=stop)
        self.growing = Growing(state, files, index_storage, chosen.follow_every_s, step_down)
        self._links = PserverLinks(state, chosen.job, directory, connector)
        self.locations = ModelLocations(state, chosen.job, held.generation, directory, connector)
        self.declaring = Declaring(state, self.growing, self._indexing)
        self.checkpoints = CheckpointStore(checkpoints, state, chosen.job)
        self.tasks = Tasks(state)
        self.presence = PresenceWatch(coordinator, directory, keys, clock)
        self.exports = ModelExports(checkpoints, chosen.job, state.ask, held.require, clock)

    def start(self, recovered: RecoveredState) -> None:
        """Start from the predecessor's state: begin writing to etcd and calling pservers.

        Raises:
            DataError: the declared dataset cannot be indexed again, or has changed.
            UnavailableError: the dataset's store has failed for longer than a moment.
        """
        state, stored = self._state, recovered.stored
        declared, dataset = stored.declaration.dataset, None
        if declared is not None:
            dataset = self._indexing.index_again(declared, recovered.arrivals)
        state.recover(stored, dataset, len(recovered.arrivals))
        state.start_writing(self._held, recovered.known, self._step_down)
        self._moves = MoveTransactions(
            state, self._held, self._coordinator, self._keys, recovered.placed_at, self._step_down
        )
        self._links.follow(state.core.pservers.count)
        self.growing.begin()
        while not self._directory.wait_until(lambda d: d.revision > 0 or None, _KEYS_S):
            if not self._held.is_held:
                raise FencedError("the lock was lost before the job's keys were read")
        # Subscribe first, so that no change is missed.
        self._directory.subscribe(self.read_directory)
        self.read_directory()

    def close(self) -> None:
        self.presence.close()
        self.exports.close()
        self.growing.close()
        self._links.close()
        if self._moves is not None:
            self._moves.close()
        self.checkpoints.close()
        self._state.close()
        self._indexing.close()

    def ask(self, request: Request) -> Any:
        return self._state.ask(request)

    def _carry(self, effect: out.Effect) -> None:
        match effect:
            case out.WakePserver(index):
                self._links.wake(index)
            case out.StoreMoves():
                assert self._moves is not None, "blocks move before the master has started"
                self._moves.do(effect)
            case out.StoreWork():
                self.checkpoints.do(effect)
            case out.DeleteElection(step, revision):
                self._state.wait_durable(revision)
                delete_election(self._held, self._keys, step)

    def read_directory(self) -> None:
        # The lock prevents an older set of leases from replacing a newer one. The revision is read first, so it is
        # never newer than the leases.
        with self._looking:
            revision = self._directory.revision
            trainers = {name: record.generation for name, record in self._directory.trainers().items()}
            records, state = self._directory.pservers(), self._state
            pservers = {index: record.generation for index, record in records.items()}
            state.processes |= {record.generation: record.process for record in records.values() if record.process}
            with state.lock:
                for trainer, generation in state.core.trainers.items():
                    if trainers.get(trainer) != generation:
                        state.progress.gone(trainer)
            self._links.follow(max(pservers, default=-1) + 1)
            state.apply(LeasesSeen(trainers, pservers, revision))
            keys = self._keys
            state.apply(read_moves(self._directory.entry(keys.placement), self._directory.entry(keys.moving), revision))

    def tick(self) -> None:
        state = self._state
        with state.lock:
            progressed = state.progress.take_progressed()
        state.apply(StatusReceived(self._links.statuses))
        state.apply(TimePassed(progressed))

    def inheritance(self) -> GroupRecord:
        """Return the group's record for the next start, which has another master."""
        with self._state.lock:
            return self._state.core.group.inheritance()

    def drain(self, timeout_s: float) -> None:
        """Make a last checkpoint before this master exits, if all pservers are present."""

        def may_go_on() -> bool:
            self.tick()
            state = self._state
            return self._held.is_held and len(state.core.pservers.present) >= state.core.pservers.count

        self.checkpoints.drain(timeout_s, may_go_on)

    def parameter_servers(self) -> tuple[str, list[str]]:
        """Return the plan hash and the pservers' addresses, for any Flight client.

        Raises:
            NotReadyError: the model has not been declared yet.
        """
        model = self._state.core.declaration.model
        if model is None:
            raise NotReadyError("no trainer has declared the model yet")
        return model.plan_hash, [record.address for record in self._directory.pservers().values()]

    def log(self, report: LogRequest) -> LogReply:
        state = self._state
        with state.lock:
            if report.trainer not in state.core.trainers:
                return LogReply()
            state.progress.add(report, state.clock.now())
            return LogReply(
                wants_stacks=state.progress.trainers[report.trainer].wants_stacks,
                every_s=report_every_s(len(state.core.trainers)),
            )

    def stacks_of_trainer(self, request: StacksRequest, closing: threading.Event) -> StacksReply:
        """Return the stack traces of a trainer's threads, which the trainer sends with its next report.

        Raises:
            NotFoundError: the trainer does not exist.
        """
        state = self._state
        with state.lock:
            if request.trainer not in state.core.trainers:
                raise NotFoundError(f"there is no trainer {request.trainer}")
            found = state.progress.trainers.setdefault(request.trainer, TrainerProgress(heard_at=state.clock.now()))
            found.stacks, found.wants_stacks = "", True
        deadline = state.clock.now() + min(request.wait_s, _STACKS_S)
        while not found.stacks and state.clock.now() < deadline and not closing.wait(_LOOK_S):
            pass
        found.wants_stacks = False
        return StacksReply(text=found.stacks)

    def status(self) -> StatusReply:
        with self._state.lock:
            return describe(
                self.job,
                self._state,
                self._directory,
                self._links.statuses,
                self._indexing.doing,
                self.refusals(),
                self._consumers(self._state.core.pservers.count),
            )

    def _consumers(self, pservers: int) -> list[ConsumerStatus]:
        found, keys = [], self._keys
        for name, record in sorted(self._directory.consumers().items()):
            _, entries = self._directory.entries(*(keys.acknowledgement(name, index) for index in range(pservers)))
            values = [None if entry is None else entry.value for entry in entries]
            found.append(consumer_status(name, record, values, self._state.clock.wall_time()))
        return found

    @property
    def journal(self) -> Journal:
        return self._state.journal

    def events(self, request: EventsRequest, closing: threading.Event) -> EventsReply:
        return self._state.journal.read(request, closing)
