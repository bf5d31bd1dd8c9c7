"""What one master knows, which the rooms of its core share, and what a successor goes on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from msgspec.structs import replace

from flightedl.domain.checkpoint.checkpoints import Checkpoints
from flightedl.domain.checkpoint.manifest import ShardFile
from flightedl.domain.checkpoint.values import CheckpointSettings
from flightedl.domain.consistency.membership import Membership
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.groups.incarnation import Group
from flightedl.domain.master import effects as out
from flightedl.domain.master.checkpointing import Checkpointing
from flightedl.domain.master.deterministic_schedule import DeterministicSchedule
from flightedl.domain.master.ending import Ending
from flightedl.domain.master.evaluations import Evaluations
from flightedl.domain.master.members import Members
from flightedl.domain.master.pservers import Pservers
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import QueueSettings
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration
from flightedl.messages.groups import GroupRecord
from flightedl.messages.tasks import StopRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What stays the same for the life of a master.

    Args:
        generation: The master's.
        pserver_count: Of the job.
        trainer_count: For deterministic runs; 0: it is not known.
        recovery: What is done when a pserver comes back with less than it had.
        checkpoints: When they are made.
        keeps_checkpoints: Whether there is anywhere to keep them.
        attempts_limit: Number of a group's starts that the same records may end.
    """

    generation: int
    pserver_count: int
    trainer_count: int = 0
    recovery: Literal["replay", "rollback"] = "replay"
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    keeps_checkpoints: bool = True
    attempts_limit: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """What a predecessor left. The bytes are as ``MasterState.encode`` gave them; None: there is nothing of it."""

    declaration: JobDeclaration = field(default_factory=JobDeclaration)
    queue: bytes | None = None
    failures: bytes | None = None
    evaluations: bytes | None = None
    membership: bytes | None = None
    recovery: bytes | None = None
    checkpoints: bytes | None = None
    group: bytes | None = None
    #: Of the newest checkpoint, with what they are built on; empty: that is not known.
    files: tuple[ShardFile, ...] = ()
    #: Who stopped the job; None if nobody did.
    stop: StopRecord | None = None
    #: Whether the queue is that of a checkpoint: of the trainers that held work then nobody knows that they died.
    is_resumed: bool = False


class MasterState:
    """Everything that the rooms of a master's core read and change.

    Raises:
        UsageError: the stored queue is of other tasks.
        FencedError: the stored membership is a newer master's.
    """

    def __init__(
        self,
        settings: CoreSettings,
        now: float,
        stored: StoredState,
        tasks: QueueSettings | None,
    ) -> None:
        self.settings = settings
        self.now = now
        self.outbox = out.Outbox()
        self.declaration = stored.declaration
        #: Its stored form, made once: it goes into every comparison with what is stored.
        self._encoded_declaration = (JobDeclaration(), b"")
        self.stop = stored.stop
        #: The training data's queue; None: no dataset is declared.
        self.work: Work | None = None
        #: None until the model is declared: before that nobody waits for anybody.
        self.members: Members | None = None
        self.schedule = DeterministicSchedule(settings.trainer_count)
        #: Trainer -> generation, and pservers, whose lease is alive, as of this revision of etcd or later.
        self.trainers: Mapping[str, int] = {}
        self.leases_revision = 0
        self.pservers = Pservers(settings.pserver_count, settings.recovery, stored.recovery, self.outbox)
        checkpoints = self._checkpoints(stored)
        self.checkpointing = Checkpointing(checkpoints, is_kept=settings.keeps_checkpoints, outbox=self.outbox)
        #: The ranks to which the training data goes, if they are a group.
        record = None if stored.group is None else decode(stored.group, GroupRecord)
        self.group = Group(settings.attempts_limit, record)
        self.ending = Ending(self.pservers, self.checkpointing)
        self.evaluations = Evaluations(self.outbox)
        if stored.evaluations is not None:
            self.evaluations.recover(stored.evaluations)
        if tasks is not None:
            self.begin_training(tasks, stored.queue, stored.failures)
        if self.declaration.model is not None:
            self.begin_membership(self.declaration.model, stored.membership)
        self.ending.start(self.work)

    def _checkpoints(self, stored: StoredState) -> Checkpoints:
        settings = self.settings
        generation, count = settings.generation, settings.pserver_count
        if stored.checkpoints is None:
            return Checkpoints(settings.checkpoints, generation, count, self.now)
        return Checkpoints.restore(stored.checkpoints, settings.checkpoints, generation, count, self.now, stored.files)

    def begin_training(
        self, tasks: QueueSettings, stored: bytes | None, failures: bytes | None, *, may_reseed: bool = False
    ) -> None:
        """The dataset's tasks are known; ``stored`` and ``failures`` as a predecessor left them.

        Raises:
            UsageError: what is stored is of other settings; nothing was changed. With ``may_reseed``, another seed
                is fine.
        """
        tasks = dataclasses.replace(tasks, is_deduplicated=self._has_model)
        queue = TaskQueue.decode(stored, tasks, failures, may_reseed=may_reseed) if stored else TaskQueue(tasks)
        self.work = Work(queue, partial(self.outbox.news, ""))
        if self.is_stopped:
            queue.stop()

    def begin_membership(self, model: DeclaredModel, stored: bytes | None) -> None:
        """There is a model, so there is somebody to wait for.

        Raises:
            FencedError: ``stored`` is a newer master's.
        """
        mode = Mode.from_json(model.present_mode)
        generation, count = self.settings.generation, self.settings.pserver_count
        membership = (
            Membership(generation, count, mode=mode)
            if stored is None
            else Membership.restore(stored, generation, count, mode=mode)
        )
        self.members = Members(membership, self.schedule, self.outbox)
        for index, each in self.pservers.present.items():
            if index < count:
                self.members.pserver_up(index, each)
        self._deduplicate()

    def _deduplicate(self) -> None:
        if self.work is not None and self._has_model:
            self.work.queue.deduplicate()

    def adopt_model(self, declared: ModelDeclaration) -> DeclaredModel:
        """The model of a job that was resumed is this one from now on, also for pservers."""
        model = self.declaration.model
        assert model is not None, "a former model is one"
        model = replace(model, declaration=declared, is_former=False)
        self.declaration = replace(self.declaration, model=model)
        self._deduplicate()
        self.touch()
        return model

    # what there is

    def touch(self) -> None:
        self.outbox.touch()

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    @property
    def revision(self) -> int:
        """Counts changes of the state that is stored."""
        return self.outbox.revision

    @property
    def plan_hash(self) -> str:
        """Of the declared model; empty: none is declared."""
        model = self.declaration.model
        return "" if model is None else model.plan_hash

    @property
    def _has_model(self) -> bool:
        """True if trainers of this job have declared a model, whose pservers count each batch once."""
        return self.declaration.model is not None and not self.has_former_model

    @property
    def has_former_model(self) -> bool:
        """Whether the model waits for a trainer that declares it again, and pservers wait with it."""
        return self.declaration.model is not None and self.declaration.model.is_former

    @property
    def serving_members(self) -> Members | None:
        """The members, where pservers may have values."""
        return None if self.has_former_model and not self.is_over else self.members

    @property
    def is_over(self) -> bool:
        """Whether all training is done that will ever be."""
        return self.group.is_done or (self.work is not None and self.work.queue.is_over)

    def look_at_end(self) -> None:
        """Something has happened: an epoch may have ended, or the job."""
        before = self.ending.may_end
        self.ending.look(self.work, self.serving_members, self.now)
        self.ending.may_end |= self.group.is_done
        if self.ending.may_end and not before:
            self.outbox.note(out.Kind.JOB_DONE, "", "all is done")

    def tick_checkpoints(self) -> None:
        members = self.serving_members
        if members is not None:
            self.checkpointing.tick(self.now, self.ending.open_rounds(members))

    # storage

    def encode(self) -> dict[str, bytes]:
        """What a later master goes on from, by name; all of it belongs into one transaction.

        ``declaration``, ``queue``, ``failures``, ``evaluations``, ``membership``, ``recovery`` (of pservers),
        ``checkpoints``, ``group`` and ``stopped``; what there is nothing of is left out.
        """
        values: dict[str, bytes] = {}
        if self.members is not None:
            values["membership"] = self.members.membership.encode()
            values["recovery"] = self.pservers.encode()
        if self.checkpointing.is_kept:
            values["checkpoints"] = self.checkpointing.checkpoints.encode()
        if self.work is not None:
            values["queue"], values["failures"] = self.work.queue.encode_parts()
        if self.stop is not None:
            values["stopped"] = encode(self.stop)
        if self.group.has_started:
            values["group"] = encode(self.group.record)
        if self.evaluations:
            values["evaluations"] = self.evaluations.encode()
        if self.declaration.dataset is not None or self.declaration.model is not None:
            if self._encoded_declaration[0] is not self.declaration:
                self._encoded_declaration = (self.declaration, encode(self.declaration))
            values["declaration"] = self._encoded_declaration[1]
        return values

    def check(self) -> None:
        if self.work is not None:
            self.work.queue.check()
        if self.members is not None:
            self.members.membership.check()
        self.checkpointing.checkpoints.check()
        self.pservers.check()
        self.group.check()
