"""The master as a pure state machine: events in, effects out.

The rooms share one ``MasterState``; an event belongs to one of them, or is a look at leases, time or storage, which
concerns all and is in here.

Not in here, as it is not decided by events but by files: the datasets' chunks. Whoever drives the core tells it how
many tasks a dataset has, and how many batches each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.control import PserverControl
from flightedl.domain.master.declaring import Declaring
from flightedl.domain.master.requests import Requests
from flightedl.domain.master.state import CoreSettings, MasterState, StoredState
from flightedl.domain.queue.values import QueueSettings


class MasterCore(MasterState):
    """What one master knows and decides. Not thread-safe.

    Raises:
        UsageError: the stored queue is of other tasks.
        FencedError: the stored membership is a newer master's.
    """

    def __init__(
        self,
        settings: CoreSettings,
        now: float,
        stored: StoredState | None = None,
        tasks: QueueSettings | None = None,
    ) -> None:
        stored = StoredState() if stored is None else stored
        super().__init__(settings, now, stored, tasks)
        self._is_resumed = stored.is_resumed
        self._has_seen_leases = False
        declaring = Declaring(self)
        self.requests = Requests(self, declaring)
        self._control = PserverControl(self)
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            events.TimePassed: self._time_passed,
            events.LeasesSeen: self._leases_seen,
            events.ManifestWritten: self._manifest_written,
            events.ManifestFailed: self._manifest_failed,
            events.PointerStored: self._pointer_stored,
            events.Asked: self.requests.asked,
            events.WaitEnded: self.requests.wait_ended,
            events.DatasetIndexed: declaring.dataset_indexed,
            events.FilesJoined: declaring.files_joined,
            events.GrowthEnded: declaring.growth_ended,
            events.ModelPlanned: declaring.model_planned,
            events.EvaluationIndexed: declaring.evaluation_indexed,
            events.ControlAsked: self._control.asked,
            events.Answered: self._control.answered,
            events.StatusTold: self._control.status_told,
        }

    def apply(self, event: events.Event, now: float) -> list[out.Effect]:
        """What follows from an event, in the order in which it is to be done.

        Raises:
            UsageError: files joined that cannot join; nothing was changed.
        """
        self.now = now
        self._handlers[type(event)](event)
        self.look_at_end()
        while self.outbox.is_stirred:
            self.outbox.is_stirred = False
            self.requests.look_at_all()
            self.look_at_end()
        return self.outbox.take()

    # leases

    def _leases_seen(self, event: events.LeasesSeen) -> None:
        before, self.trainers, self.leases_revision = self.trainers, event.trainers, event.revision
        for trainer, generation in before.items():
            if event.trainers.get(trainer) != generation:
                self._trainer_gone(trainer, is_alive=trainer in event.trainers)
                self.requests.groups.gone(trainer, generation)
        for trainer, generation in event.trainers.items():
            if before.get(trainer) != generation:
                text = "trainer is there trainer=%s generation=%d"
                self.outbox.note(out.Kind.TRAINER_CAME, trainer, text, trainer, generation)
        self._pservers_seen(event.pservers)
        if not self._has_seen_leases:
            self._has_seen_leases = True
            self._forget_the_dead()
        self.outbox.is_stirred = True

    def _pservers_seen(self, present: Mapping[int, int]) -> None:
        known, self.pservers.present = self.pservers.present, dict(present)
        for index, generation in known.items():
            if index not in present and self.members is not None:
                self.members.pserver_down(index)
            if present.get(index) != generation:
                text = "pserver is gone index=%d generation=%d"
                self.outbox.note(out.Kind.PSERVER_GONE, out.pserver_named(index), text, index, generation)
                self.checkpointing.down(index, self.now)
        for index, generation in present.items():
            if known.get(index) != generation and index < self.settings.pserver_count:
                self.pservers.seen(index, generation)
                if self.members is not None:
                    self.members.pserver_up(index, generation)

    def _trainer_gone(self, trainer: str, *, is_alive: bool) -> None:
        """``is_alive``: it lost its lease, and has registered again: its work is not to blame."""
        self.outbox.note(out.Kind.TRAINER_GONE, trainer, "trainer is gone trainer=%s is_alive=%s", trainer, is_alive)
        if self.work is not None:
            self.work.trainer_gone(trainer, self.now, is_graceful=is_alive)
        self.evaluations.trainer_gone(trainer, self.now, is_graceful=is_alive)
        self.requests.trainer_gone(trainer)
        self.touch()
        if self.members is not None:
            self.members.leave(trainer)

    def _forget_the_dead(self) -> None:
        """Trainers that died while there was no master lose what the predecessor's state says they have."""
        self.requests.groups.forget_the_dead()
        is_graceful = self._is_resumed
        if self.work is not None and self.work.forget_the_dead(self.trainers, self.now, is_graceful=is_graceful):
            self.touch()
        if self.members is not None:
            for member in self.members.membership.members:
                if self.trainers.get(member.trainer) != member.generation:
                    self.members.leave(member.trainer)

    # time

    def _time_passed(self, event: events.TimePassed) -> None:
        is_held_up = self.serving_members is not None and not self.pservers.is_everybody_settled
        if self.work is not None and self.work.tick(self.now, is_held_up=is_held_up, progressed=event.progressed):
            self.touch()
        if self.evaluations.tick(self.now, is_held_up=is_held_up, progressed=event.progressed):
            self.touch()
        self._control.look_at_all()
        self.look_at_end()
        self.tick_checkpoints()
        self.outbox.is_stirred = True

    # the checkpoints' storage

    def _manifest_written(self, event: events.ManifestWritten) -> None:
        self.checkpointing.perform(self.checkpointing.checkpoints.manifest_written(event.number, event.checksum))

    def _manifest_failed(self, event: events.ManifestFailed) -> None:
        checkpoints = self.checkpointing.checkpoints
        self.checkpointing.perform(checkpoints.manifest_failed(event.number, event.reason, self.now))

    def _pointer_stored(self, event: events.PointerStored) -> None:
        self.checkpointing.perform(self.checkpointing.checkpoints.pointer_moved(event.number, self.now))
        self.outbox.note(out.Kind.CHECKPOINT_DONE, "", "checkpoint complete number=%d", event.number)
        self.outbox.is_stirred = True
