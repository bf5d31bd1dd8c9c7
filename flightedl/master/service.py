"""One master at work: its parts put together, begun from what a predecessor left, and told what time and leases do.

``state`` is what all parts share, under one lock. What trainers are is taken from the directory (leases in etcd): a
trainer whose key is gone loses its tasks and its membership at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flightedl.config import MasterSettings
from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.coordination.keys import JobKeys
from flightedl.errors import FencedError, NotReadyError
from flightedl.master.beginning import Beginning
from flightedl.master.completion import Completion
from flightedl.master.declaring import Declaring
from flightedl.master.evaluations import Evaluations
from flightedl.master.exporting import ModelExports
from flightedl.master.growing import Growing
from flightedl.master.indexing import DatasetIndexing
from flightedl.master.lockstep import Lockstep
from flightedl.master.members import Members
from flightedl.master.pservers import Pservers
from flightedl.master.recovery import RecoveredState
from flightedl.master.state import JobState
from flightedl.master.status import describe
from flightedl.master.tasks import Tasks
from flightedl.messages.status import StatusReply
from flightedl.messages.tasks import LogRequest
from flightedl.ports import Clock, Coordinator, Files, Storage
from flightedl.rpc.authentication import Credentials

_log = logging.getLogger(__name__)

#: How long a new master waits for the job's keys at a time.
_KEYS_S = 3.0


class MasterService:
    """The master's parts, and what concerns more than one of them. Thread-safe."""

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
        credentials: Credentials | None,
        step_down: Callable[[str], None],
    ) -> None:
        self._settings = chosen
        self._held = held
        self._directory = directory
        self._step_down = step_down
        evaluations = Evaluations(lambda: DatasetIndexing(files, clock, index_storage), chosen.attempts_limit)
        state = self._state = JobState(chosen, pserver_count, coordinator, keys, clock, evaluations)
        self._indexing = DatasetIndexing(files, clock, index_storage, follow_every_s=chosen.follow_every_s)
        self.growing = Growing(state, files, index_storage, chosen.follow_every_s)
        self._beginning = Beginning(pserver_count, held, keys)
        self._pservers = Pservers(state, chosen.job, directory, credentials, self._beginning, held.generation)
        self.members = Members(state, held.generation, self._pservers.wake)
        self.members.lockstep = Lockstep(state, chosen.trainers)
        self.declaring = Declaring(state, self.members, self.growing, self._indexing)
        self.completion = Completion(chosen, state, self._pservers, held, checkpoints)
        self.tasks = Tasks(state, self.members, self.completion.may_end)
        self.exports = ModelExports(checkpoints, chosen.job, self.completion.order, held.require)

    def start(self, recovered: RecoveredState) -> None:
        """Go on from what the predecessor left, and begin to write and to send views.

        Raises:
            DataError: the dataset that was declared cannot be indexed again, or has changed.
        """
        state = self._state
        state.declaration = recovered.declaration
        state.is_stopped = recovered.is_stopped
        if recovered.declaration.dataset is not None:
            dataset = self._indexing.index_again(recovered.declaration.dataset, recovered.arrivals)
            state.arrivals_saved = len(recovered.arrivals)
            state.begin_queue(dataset, recovered.queue, recovered.failures)
        if recovered.declaration.model is not None:
            self.members.begin(recovered.declaration.model, recovered.membership)
        if recovered.evaluations is not None:
            state.evaluations.recover(recovered.evaluations)
        self.completion.start(recovered)
        state.start_writing(self._held, recovered, self._step_down)
        self._pservers.start(self.members)
        self.growing.begin()
        while not self._directory.wait_until(lambda d: d.revision > 0 or None, _KEYS_S):
            if not self._held.is_held:
                raise FencedError("the lock was lost before the job's keys were read")
        with state.changed:
            # First, so that no change falls between; it is told of when the lock is free.
            self._directory.subscribe(self.look_at_directory)
            self.look_at_directory()
            self._forget_the_dead(is_graceful=recovered.is_resumed)

    def _forget_the_dead(self, *, is_graceful: bool) -> None:
        """Locked: trainers that died while there was no master lose what the predecessor's state says they have.

        Of trainers of a run that was stopped, nobody knows that they died.
        """
        state = self._state
        if state.dispatch is not None and state.dispatch.forget_the_dead(
            state.trainers, state.clock.now(), is_graceful=is_graceful
        ):
            state.touch()
        for member in () if state.membership is None else state.membership.members:
            if state.trainers.get(member.trainer) != member.generation:
                self.members.leave(member.trainer)

    def close(self) -> None:
        """Stop the threads; nobody is answered any more."""
        self.exports.close()
        self.growing.close()
        self._pservers.close()
        self.completion.close()
        self._state.close()
        self._indexing.close()

    def look_at_directory(self) -> None:
        """Trainers and pservers may have come or gone."""
        state = self._state
        with state.changed:
            # Read under the lock, so that whoever comes later has seen no less; the revision first, which may be
            # older than what is read then, but never newer.
            revision = self._directory.revision
            trainers = {name: record.generation for name, record in self._directory.trainers().items()}
            pservers = {index: record.generation for index, record in self._directory.pservers().items()}
            for trainer, generation in state.trainers.items():
                if trainers.get(trainer) != generation:
                    self._trainer_gone(trainer, is_alive=trainer in trainers)
            state.trainers, state.trainers_revision = trainers, revision
            self._pservers.look(pservers, self.members)
            state.changed.notify_all()

    def _trainer_gone(self, trainer: str, *, is_alive: bool) -> None:
        """``is_alive``: it lost its lease, and has registered again: its work is not to blame."""
        _log.info("trainer is gone trainer=%s is_alive=%s", trainer, is_alive)
        state, now = self._state, self._state.clock.now()
        state.progress.gone(trainer)
        if state.dispatch is not None:
            state.dispatch.trainer_gone(trainer, now, is_graceful=is_alive)
        state.evaluations.trainer_gone(trainer, now, is_graceful=is_alive)
        state.touch()
        self.members.leave(trainer)

    def tick(self) -> None:
        """Time has passed."""
        state = self._state
        with state.changed:
            now = state.clock.now()
            if state.dispatch is not None and state.dispatch.tick(now):
                state.touch()
            if state.evaluations.tick(now):
                state.touch()
            self.completion.tick()

    def parameter_servers(self) -> tuple[str, list[str]]:
        """Plan hash and addresses of the pservers, for any Flight client.

        Raises:
            NotReadyError: there is no model yet.
        """
        model = self._state.declaration.model
        if model is None:
            raise NotReadyError("no trainer has declared the model yet")
        return model.plan_hash, [record.address for record in self._directory.pservers().values()]

    def log(self, report: LogRequest) -> None:
        """A trainer's progress."""
        state = self._state
        with state.changed:
            if report.trainer in state.trainers:
                state.progress.add(report, state.clock.now())

    def status(self) -> StatusReply:
        """The job at a glance."""
        state, now = self._state, self._state.clock.now()
        with state.changed:
            return describe(
                self._settings.job,
                declaration=state.declaration,
                queue=state.queue,
                indexed=state.dataset,
                membership=state.membership,
                trainers=state.trainers,
                trainer_records=self._directory.trainers(),
                records=self._directory.pservers(),
                pservers=self._pservers.said,
                master=self._directory.master(),
                progress=state.progress,
                indexing=self._indexing.doing or self._beginning.waiting_for or state.replay.refusal,
                missing_tasks=state.replay.missing_count,
                dataset_alarm=state.dataset_alarm,
                evaluations=state.evaluations.status(),
                checkpointing=state.checkpointing,
                is_over=state.is_over,
                is_stopped=state.is_stopped,
                may_end=self.completion.may_end(),
                now=now,
            )
