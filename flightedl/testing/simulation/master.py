"""A master of the simulated cluster: the production core, driven around a modelled etcd, store and network.

Nothing is decided here. Events go into the core, and its effects are carried out when the state that they came from is
stored: one write at a time carries all that has changed. Each write compares the lock's generation and the revision of
what it overwrites; one of unknown outcome is repeated as it was, until it is known to have happened or to be
impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flightedl.domain.checkpoint import values
from flightedl.domain.checkpoint.checkpoints import Checkpoints, next_number_after
from flightedl.domain.checkpoint.manifest import Manifest, candidates, checksum, examine, manifest_name
from flightedl.domain.checkpoint.pointer import decode_pointer
from flightedl.domain.checkpoint.values import Pointer
from flightedl.domain.consistency.membership_values import Admitted
from flightedl.domain.consistency.membership_values import Effect as MembershipEffect
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.members import Members
from flightedl.domain.master.state import CoreSettings, StoredState
from flightedl.domain.master.work import Work
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import Effect, Expired, Quarantined
from flightedl.domain.recovery.store_history import BeginLife, Refuse, Sighting, judge
from flightedl.errors import CorruptError, FencedError, FlightedlError, NotReadyError
from flightedl.messages.base import decode, encode
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.control import AppliedReply, SealRequest, SnapshotReply, ViewReply, ViewRequest
from flightedl.messages.declarations import JobDeclaration
from flightedl.messages.status import PserverStatusReply
from flightedl.messages.tasks import (
    FinishedTask,
    JoinReply,
    JoinRequest,
    ModeRequest,
    ReturnedTask,
    TasksReply,
    TasksTicket,
)
from flightedl.recording.master import master_core
from flightedl.testing.simulation.etcd import (
    ADDRESS,
    DONE,
    HISTORY,
    INIT,
    LOCK,
    STATE,
    History,
    Transaction,
    claimed,
)
from flightedl.testing.simulation.job import declaration_of, tasks_of, with_tasks
from flightedl.testing.simulation.world import Action, Process, Reply, Violation

if TYPE_CHECKING:
    from flightedl.testing.simulation.cluster import Cluster

LEASE_TTL_S = 2.0
_TICK_S = 0.5
_CALL_S = 1.0
_RETRY_S = 0.1
_STATUS_S = 0.5
_DRAIN_S = 5.0


class Link:
    """The way to one pserver: one call at a time, as by a thread."""

    def __init__(self) -> None:
        #: Whether a call is under way.
        self.is_busy = False
        #: Whether there may be something to say since it became busy.
        self.is_woken = False
        #: Rises with each call and each pause: what belongs to an older one is not heard.
        self.token = 0
        #: Which process is called.
        self.generation = 0
        #: What the pserver last said of itself; None: it cannot be reached.
        self.said: PserverStatusReply | None = None


class Master(Process):
    """One process: it stands by, takes the lock, goes on from what is stored, and leads until it is deposed."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.flaws = cluster.flaws
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.generation = 0
        self.is_leading = False
        self.core: MasterCore
        self.recorder = cluster.recorder("master", name)
        self._durable = -1
        self._state_revision = 0
        self._is_writing = False
        self._is_ready = False
        self._when_durable: list[tuple[int, Action]] = []
        #: Members that all pservers have agreed to.
        self._admitted: set[int] = set()
        #: call -> where its answer goes.
        self._calls: dict[int, Reply] = {}
        self._call_count = 0
        self._links = [Link() for _ in range(cluster.pserver_count)]
        #: Whether files that joined are not stored yet.
        self._is_growing = False
        #: Work in the store goes one after the other.
        self._store_work: list[out.StoreWork] = []
        self._is_storing = False
        #: What goes into etcd with the first state.
        self._first_puts: dict[str, Any] = {}
        cluster.etcd.watch(self, self._look_around)
        self.later(0.05 * cluster.world.random.random(), self._claim)

    def end(self, why: str) -> None:
        """Exit; the supervisor starts another one."""
        if self.is_alive:
            self.world.note("{} ends: {}", self.name, why)
            self.cluster.ended(self)

    # the lock

    def _claim(self) -> None:
        if self.generation or self.lease.is_lost:
            if not self.generation:
                self.end("its lease was lost while it stood by")
            return
        if LOCK in self.directory:
            self.later(0.5, self._claim)
            return

        def answered(result: Any) -> None:
            if self.generation:
                return
            if generation := claimed(result, LOCK, self):
                self.generation = generation
                self.world.note("{} leads, generation {}", self.name, generation)
                self._recover()
            else:
                self.later(0.3, self._claim)

        etcd = self.cluster.etcd
        transaction = Transaction(created={LOCK: 0}, puts={LOCK: self}, lease=self.lease)
        self.world.call(self, etcd, etcd.transact, transaction, answered, lambda: self.end("no answer to its claim"))

    def _recover(self) -> None:
        etcd = self.cluster.etcd

        def read(found: dict[str, Any]) -> None:
            self._find_newest(lambda number, newest: self._judge(found[STATE], found[HISTORY], number, newest))

        self.world.call(self, etcd, etcd.read, [STATE, HISTORY], read, lambda: self.later(0.2, self._recover))

    def _find_newest(self, done: Callable[[int, Sighting | None], None]) -> None:
        """The newest checkpoint, and etcd as it was then; 0: there is none, or it cannot be told."""
        store = self.cluster.store

        def unreachable() -> None:
            # That a store cannot be read while etcd goes back is what nobody promises to notice.
            self.later(0.2, self._recover) if self.cluster.etcd.has_gone_back else done(0, None)

        def look(numbers: Sequence[int]) -> None:
            def read(found: tuple[bytes, bool] | None) -> None:
                try:
                    manifest = None if found is None else Manifest.decode(found[0])
                except CorruptError:
                    manifest = None
                done(numbers[0], manifest.etcd) if manifest is not None else look(numbers[1:])

            if numbers:
                store.read(self, manifest_name(numbers[0]), read, unreachable)
            else:
                done(0, None)

        store.list(self, lambda sizes: look(candidates(sizes)), unreachable)

    def _judge(self, state: Any, history: Any, number: int, newest: Sighting | None) -> None:
        """Whether to go on from what etcd says, which may have gone back."""
        present = self.witness.seen
        assert present is not None, "etcd was asked a moment ago"
        record = History() if history is None else history.value
        next_number = None if state is None else _next_number(state.value.get("checkpoints"))
        resume = self.cluster.is_resumed
        match judge(present, record.life, record.cluster, next_number, number, newest, resume=resume):
            case Refuse(why):
                self.cluster.refused(self, why)
            case BeginLife(life, _):
                election = self.directory.get(INIT)
                going = (STATE, *((INIT,) if election is not None and election.lease is None else ()))
                begun = Transaction({LOCK: self.generation}, {}, {HISTORY: History(life, present.cluster)}, going)
                self._write_first(begun, lambda: self.end(f"it has begun life {life} of the job"))
            case _ if not record.cluster:
                known = Transaction({LOCK: self.generation}, {}, {HISTORY: History(record.life, present.cluster)})
                self._write_first(known, lambda: self._go_on(state))
            case _:
                self._go_on(state)

    def _write_first(self, transaction: Transaction, then: Action) -> None:
        etcd = self.cluster.etcd

        def answered(result: Any) -> None:
            then() if result[0] else self.end("it lost the lock before it led")

        self.world.call(self, etcd, etcd.transact, transaction, answered, lambda: self.end("etcd does not answer"))

    def _go_on(self, state: Any) -> None:
        if state is None:
            self._begin_from_store()
        else:
            self._state_revision = state.modified
            self._begin(state.value)

    def _settings(self) -> CoreSettings:
        return CoreSettings(
            generation=self.generation,
            pserver_count=self.cluster.pserver_count,
            trainer_count=self.cluster.scenario.trainer_count,
            recovery=self.cluster.shape.recovery,  # type: ignore[arg-type]
            checkpoints=self.cluster.scenario.checkpoints,
            keeps_checkpoints=self.cluster.scenario.keeps_checkpoints,
        )

    def _begin(self, stored: dict[str, bytes]) -> None:
        state = StoredState(
            declaration=decode(stored["declaration"], JobDeclaration),
            queue=stored["queue"],
            failures=stored["failures"],
            membership=stored["membership"],
            recovery=stored["recovery"],
            checkpoints=stored.get("checkpoints"),
            evaluations=stored.get("evaluations"),
            is_stopped="stopped" in stored,
        )
        self._take_over(state, int(stored["tasks"]))

    def _take_over(self, stored: StoredState, task_count: int) -> None:
        tasks = self.cluster.shape.queue_settings(task_count)
        try:
            self.core = master_core(self.recorder, self._settings(), self.world.now, stored, tasks)
        except FencedError:
            self.end("it heard late that it has the lock; a newer one had it since")
        else:
            self._lead()

    def _begin_from_store(self) -> None:
        """The job's etcd is new: go on from the newest checkpoint that there is."""

        def again() -> None:
            self.later(0.2, self._begin_from_store)

        def listed(sizes: dict[str, int]) -> None:
            self._choose(candidates(sizes), sizes, [])

        self.cluster.store.list(self, listed, again)

    def _choose(self, numbers: tuple[int, ...], sizes: dict[str, int], rejected: list[int]) -> None:
        if not numbers:
            self._begin_new(None, sizes, rejected)
            return

        def read(found: tuple[bytes, bool] | None) -> None:
            result = None if found is None else examine(numbers[0], found[0], sizes, "job")
            if isinstance(result, Manifest):
                self._begin_new(result, sizes, rejected)
            else:
                self._choose(numbers[1:], sizes, [*rejected, numbers[0]])

        self.cluster.store.read(self, manifest_name(numbers[0]), read, lambda: self.later(0.2, self._begin_from_store))

    def _begin_new(self, manifest: Manifest | None, sizes: dict[str, int], rejected: list[int]) -> None:
        shape, count, now = self.cluster.shape, self.cluster.pserver_count, self.world.now
        mode, task_count = shape.mode, shape.first_count
        if manifest is not None:
            saved = decode(bytes(manifest.declaration), JobDeclaration)
            assert saved.model is not None, "a checkpoint has a model"
            mode, task_count = Mode.from_json(saved.model.present_mode), tasks_of(saved)
            if manifest.stored_queue is not None:
                self._first_puts = {INIT: DONE}
        checkpoints = Checkpoints(
            self.cluster.scenario.checkpoints,
            self.generation,
            count,
            now,
            next_number=next_number_after(list(sizes)),
            latest=None if manifest is None else Pointer(manifest.number, checksum(manifest.encode())),
            rejected=rejected,
            first=0 if manifest is None else manifest.first,
        )
        state = StoredState(
            declaration=declaration_of(mode, count, shape.cut_for),
            queue=None if manifest is None else manifest.stored_queue,
            checkpoints=checkpoints.encode(),
            evaluations=None if manifest is None else manifest.stored_evaluations,
            is_resumed=True,
        )
        self._take_over(state, task_count)

    def _lead(self) -> None:
        self._is_ready = True
        core = self.core
        self._observe(core.work)  # type: ignore[arg-type]
        self._observe_members(core.members)  # type: ignore[arg-type]

        def publish() -> None:
            transaction = Transaction(
                created={LOCK: self.generation}, puts={ADDRESS: self}, lease=self.lease, writer=self.generation
            )

            def answered(result: Any) -> None:
                if result[0]:
                    self.is_leading = True
                    self._look_around()
                    self._tick()
                    for index in range(len(self._links)):
                        self._talk(index)
                else:
                    self.end("the lock was lost before it led")

            etcd = self.cluster.etcd
            self.world.call(self, etcd, etcd.transact, transaction, answered, lambda: self.later(0.2, publish))

        # A model is declared when that is stored: also what nothing has changed of yet.
        self._write()
        self._after_stored(core.revision, publish)

    def _observe(self, work: Work) -> None:
        """Check every report that counts."""
        take, queue = work.take_reports, work.queue

        def observed(ticket: TasksTicket, now: float) -> list[ReturnedTask]:
            # A trainer may report what it was given in an epoch that this queue, of an older checkpoint, has not begun.
            reports = [each for each in ticket.finished if each.epoch < queue.begun_epochs]
            current = {
                (each.epoch, each.position): each
                for each in reports
                if queue.is_current(ticket.trainer, each.attempt, ticket.generation)
            }
            before = [_done_at(queue, each) for each in reports]
            lost = take(ticket, now)
            for report, done in zip(reports, before, strict=True):
                if _done_at(queue, report) != done:
                    # Of two reports of the same task, one may be old.
                    counted = current.get((report.epoch, report.position))
                    self.cluster.account.accepted(self, counted or report, counted is not None)
            return lost

        work.take_reports = observed  # type: ignore[method-assign]

    def _observe_members(self, members: Members) -> None:
        """Know who was ever admitted."""
        perform = members.perform
        known = members.membership.members
        self._admitted = {each.member_id for each in known if each.is_admitted}

        def observed(effects: Sequence[MembershipEffect]) -> None:
            for each in effects:
                if isinstance(each, Admitted):
                    self._admitted.add(each.member_id)
                    self.cluster.account.admitted(self, each.member_id)
            perform(effects)

        members.perform = observed  # type: ignore[method-assign]

    def is_held(self) -> bool:
        """Whether it may still act; else it ends."""
        if not self.lease.is_held() and "master without a lease" not in self.flaws:
            self.end("its lease could not be renewed")
            return False
        return True

    # events and effects

    def apply(self, event: events.Event) -> None:
        """Something has happened."""
        self._carry_out(self.core.apply(event, self.world.now))

    def _carry_out(self, effects: list[out.Effect]) -> None:
        self._write()
        for effect in effects:
            match effect:
                case out.Answer(call, reply, revision):
                    if (answer := self._calls.pop(call, None)) is not None:
                        self._answer(answer, reply, revision)
                case out.WakePserver(index):
                    self._wake(index)
                case out.StoreWork():
                    self._store_work.append(effect)
                    self._next_store_work()
                case out.DeleteElection(step, revision):
                    self._after_stored(revision, lambda step=step: self._delete_election(step))  # type: ignore[misc]
                case out.Note(text, noted, _):
                    self.world.note("{}: {}", self.name, Text(text, noted))
                case out.QueueNews(_, news):
                    self._tell(news)

    def _tell(self, news: Effect) -> None:
        self.world.note("{}: {}", self.name, news)
        if isinstance(news, Quarantined):
            self.cluster.account.set_aside(self, news.piece)
        elif isinstance(news, Expired) and self.cluster.fault_scale:
            self.world.fault("task timeout")

    def _answer(self, answer: Reply, reply: Any, revision: int) -> None:
        if isinstance(reply, JoinReply) and reply.member not in {0, *self._admitted}:
            raise Violation(f"{self.name} tells of member {reply.member}, which not all pservers have agreed to")
        self._after_stored(revision, lambda: answer(reply))

    def _ask(self, event_of: Callable[[int], events.Event], wait_s: float, reply: Reply) -> None:
        """A request; the answer goes to ``reply``."""
        self._call_count += 1
        call = self._call_count
        self._calls[call] = reply
        self.apply(event_of(call))
        if call in self._calls:
            self.later(wait_s, lambda: self.apply(events.WaitEnded(call)) if call in self._calls else None)

    # stored

    def _after_stored(self, revision: int, action: Action) -> None:
        """Do it when the state of a revision is stored."""
        if self._durable >= revision or "dispatch before durable" in self.flaws:
            action()
        else:
            self._when_durable.append((revision, action))

    def _write(self) -> None:
        if not self._is_writing and self._durable < self.core.revision and self.is_alive:
            self._is_writing = True
            # Whatever is decided within this event belongs to it.
            self.later(0.0, self._write_now)

    def _write_now(self) -> None:
        self.core.check()
        self._send_state(self.core.revision, self.core.encode() | {"tasks": str(self._queue.task_count).encode()})

    @property
    def _queue(self) -> TaskQueue:
        assert self.core.work is not None, "a master that has begun has a queue"
        return self.core.work.queue

    def _send_state(self, revision: int, encoded: dict[str, bytes]) -> None:
        if not self.is_held():
            return
        etcd = self.cluster.etcd
        compared = {} if "writes are not compared" in self.flaws else {STATE: self._state_revision}
        fence = {} if "writes are not fenced" in self.flaws else {LOCK: self.generation}
        puts = {STATE: encoded} | ({} if self._state_revision else self._first_puts)
        transaction = Transaction(created=fence, modified=compared, puts=puts, writer=self.generation)

        def answered(result: Any) -> None:
            committed, at, found = result
            if committed:
                self._stored(revision, at)
                return
            lock, state = found.get(LOCK), found.get(STATE)
            if lock is None or lock.created != self.generation:
                self.end("another master holds the lock")
            elif state is not None and state.value == encoded:
                self._stored(revision, state.modified)
            else:
                self.end("somebody else wrote its state")

        def failed() -> None:
            self.later(0.1, lambda: self._send_state(revision, encoded))

        self.world.call(self, etcd, etcd.transact, transaction, answered, failed, timeout_s=1.0)

    def _stored(self, revision: int, at: int) -> None:
        self._durable = revision
        self._state_revision = at
        self._is_writing = False
        self.cluster.account.state_stored(self)
        ready = [action for wanted, action in self._when_durable if wanted <= revision]
        self._when_durable = [entry for entry in self._when_durable if entry[0] > revision]
        for action in ready:
            if self.is_alive:
                action()
        self._write()

    # who is there

    def _look_around(self) -> None:
        if not self._is_ready:
            if LOCK not in self.directory and not self.generation:
                self._claim()
            return
        if not self.is_leading:
            return
        trainers = {k.removeprefix("trainers/"): v.created for k, v in self.directory.items() if k.startswith("train")}
        pservers = {
            index: key.created
            for index in range(self.cluster.pserver_count)
            if (key := self.directory.get(f"ps/{index}")) is not None
        }
        for index, link in enumerate(self._links):
            if link.is_busy and pservers.get(index) != link.generation:
                # The call's connection is cut: the old process may be frozen.
                self._pause(index, 0.0)
        revision = max((key.modified for key in self.directory.values()), default=0)
        self.apply(events.LeasesSeen(trainers, pservers, revision))

    def _tick(self) -> None:
        if self.is_held():
            self.later(_TICK_S, self._tick)
            self._look_for_files()
            self.apply(events.StatusTold([link.said for link in self._links]))
            self.apply(events.TimePassed())

    def _look_for_files(self) -> None:
        """Files may have joined the dataset; as the growing of a real master, one step after the other."""
        if not self._queue.is_growing or self._is_growing:
            return
        cluster = self.cluster
        joined, batch_counts = cluster.joined, cluster.shape.batch_counts
        event: events.Event
        if self._queue.task_count < joined:
            event = events.FilesJoined(joined, batch_counts.__getitem__)
        elif joined == len(batch_counts):
            event = events.GrowthEnded()
        else:
            return
        self._is_growing = True

        def stored() -> None:
            self._is_growing = False

        self.apply(event)
        self._after_stored(self.core.revision, stored)

    def stop(self) -> None:
        """A trainer ends the job."""
        self._ask(events.StopAsked, 0.0, lambda _: None)

    def told_to_end(self) -> None:
        """SIGTERM: make a last checkpoint, if that is possible within some time."""
        self.later(_DRAIN_S, lambda: self.end("it was told to end"))
        if self.is_leading:
            self._drain(None)

    def _drain(self, ticket: int | None) -> None:
        request = CheckpointRequest(ticket=ticket, reason="the master is about to end", wait_s=1.0)

        def heard(reply: Any) -> None:
            if isinstance(reply, FlightedlError) or self.core.checkpointing.checkpoints.is_over(reply.ticket):
                self.end("it was told to end, and a checkpoint has everything")
            else:
                self.later(0.1, lambda: self._drain(reply.ticket))

        self._ask(lambda call: events.CheckpointAsked(call, request, is_last=True), request.wait_s, heard)

    # pservers

    def _wake(self, index: int) -> None:
        link = self._links[index]
        if link.is_busy:
            link.is_woken = True
        elif self.is_leading:
            self._pause(index, 0.0)

    def _pause(self, index: int, pause_s: float) -> None:
        """Talk to the pserver again after some time."""
        link = self._links[index]
        link.is_busy = False
        link.token += 1
        token = link.token
        pause_s, link.is_woken = 0.0 if link.is_woken else pause_s, False
        self.later(pause_s, lambda: self._talk(index) if link.token == token else None)

    def _talk(self, index: int) -> None:
        """Say the next thing that there is to say."""
        link, key = self._links[index], self.directory.get(f"ps/{index}")
        if not self.is_held():
            return
        if key is None:
            self._pause(index, 1.0)
            return
        effects = self.core.apply(events.ControlAsked(index, key.created), self.world.now)
        self._carry_out(effects)
        (call,) = [each for each in effects if isinstance(each, out.ControlCall | out.NothingToSay)]
        if isinstance(call, out.NothingToSay):
            self._ask_how_it_is(index, key, call.pause_s)
            return
        link.is_busy, link.generation = True, key.created
        link.token += 1
        token, made_at = link.token, self.core.revision
        self._after_stored(call.revision, lambda: self._say(call, key.value, token, made_at))

    def _ask_how_it_is(self, index: int, key: Any, pause_s: float) -> None:
        """In quiet times; then pause."""
        link = self._links[index]
        if pause_s < _STATUS_S:
            self._pause(index, pause_s)
            return
        link.is_busy, link.generation = True, key.created
        link.token += 1
        token = link.token

        def answered(said: PserverStatusReply | None) -> None:
            if link.token == token:
                link.said = said
                self._pause(index, pause_s)

        self.world.call(
            self, key.value, key.value.status, key.created, answered, lambda: answered(None), timeout_s=_CALL_S
        )

    def _say(self, call: out.ControlCall, pserver: Any, token: int, made_at: int) -> None:
        link = self._links[call.index]
        if isinstance(call.request, ViewRequest) and self._durable < made_at:
            raise Violation(f"{self.name} tells a pserver of members that a successor does not know")

        def over(pause_s: float) -> None:
            if link.token == token:
                self._pause(call.index, pause_s)

        def failed() -> None:
            if isinstance(call.request, ViewRequest):
                lost = events.ViewLost(call.index, call.generation, call.request.serial)
                self.later(_RETRY_S, lambda: self.apply(lost))
            over(_RETRY_S)

        def answered(reply: Any) -> None:
            if isinstance(reply, FlightedlError):
                failed()
            elif self.is_held():
                self._heard(call, reply)
                over(call.pause_s)

        # What is not waited for any more is not heard either.
        self.world.call(
            self,
            pserver,
            pserver.control,
            (call.generation, call.request),
            lambda reply: answered(reply) if link.token == token else None,
            lambda: failed() if link.token == token else None,
            timeout_s=_CALL_S,
        )

    def _heard(self, call: out.ControlCall, reply: Any) -> None:
        index, generation = call.index, call.generation
        if isinstance(reply, ViewReply):
            self.apply(events.ViewAnswered(index, generation, reply))
        elif isinstance(reply, AppliedReply):
            self.apply(events.AppliedAnswered(index, generation, call.audit, reply))
        elif isinstance(reply, SnapshotReply):
            self.apply(events.SnapshotAnswered(index, generation, reply))
        elif isinstance(call.request, SealRequest):
            self.apply(events.SealAnswered(index, generation, call.request.epochs[-1][0] + 1))

    def _delete_election(self, step: Any) -> None:
        self.world.note("{} lets the model begin again: {}", self.name, step)
        self.cluster.begun_anew += 1
        created = {LOCK: self.generation, INIT: step.election} | {f"ps/{i}": g for i, g in step.generations.items()}
        etcd = self.cluster.etcd
        transaction = Transaction(created=created, deletes=(INIT,))
        self.world.call(self, etcd, etcd.transact, transaction, lambda _: None, lambda: None)

    # trainers

    def _refusal(self) -> FlightedlError | None:
        return None if self.is_leading else NotReadyError("this master does not lead")

    def tasks(self, ticket: TasksTicket, reply: Reply) -> None:
        """Reports, and asks for work; answers a ``TasksReply``, or the error that refuses it."""
        if self.is_leading and not self.is_held():
            return
        if (refusal := self._refusal()) is not None:
            reply(refusal)
            return
        if ticket.evaluation and self.core.evaluations.known(ticket.evaluation) is not None:
            self._begin_evaluation(ticket.evaluation)

        def answer(answered: Any) -> None:
            if isinstance(answered, TasksReply):
                for assignment in answered.assignments:
                    self.cluster.account.given(ticket.trainer, ticket.evaluation, assignment)
                if answered.outcome == "epochs_done" and not ticket.evaluation:
                    self.cluster.account.told_done(self)
            reply(answered)

        self._ask(lambda call: events.WorkAsked(call, ticket), ticket.wait_s, answer)

    def declare_evaluation(self, name: str, reply: Reply) -> None:
        """The first declaration of a name begins it; answers when that is stored, or the error that refuses it."""
        if self.is_leading and not self.is_held():
            return
        if (refusal := self._refusal()) is not None:
            reply(refusal)
            return
        self._begin_evaluation(name)
        declared = self.cluster.shape.declared_evaluation().declaration
        self._ask(lambda call: events.EvaluationDeclared(call, name, declared), 0.0, reply)

    def _begin_evaluation(self, name: str) -> None:
        """Index its data, if a predecessor or nobody has: at once, here."""
        known, shape = self.core.evaluations.known(name), self.cluster.shape
        if known is None or (known.work is None and not known.is_done):
            self.apply(events.EvaluationIndexed(name, shape.declared_evaluation(), shape.evaluation_settings()))

    def join(self, request: JoinRequest, reply: Reply) -> None:
        """A trainer with work asks to be waited for; answers a ``JoinReply``, or the error that refuses it."""
        if self.is_leading and not self.is_held():
            return
        if (refusal := self._refusal()) is not None:
            reply(refusal)
            return
        self._ask(lambda call: events.JoinAsked(call, request), request.wait_s, reply)

    def change_mode(self, mode: Mode) -> None:
        """Somebody wants another mode."""
        self.world.note("somebody asks {} for the mode {}", self.name, mode)
        request = ModeRequest(mode=mode.to_json(), wait_s=0.0)
        self._ask(lambda call: events.ModeAsked(call, request), 0.0, lambda _: None)

    # checkpoints

    def _next_store_work(self) -> None:
        if self._is_storing or not self._store_work:
            return
        self._is_storing = True
        work = self._store_work.pop(0)
        self._after_stored(work.revision, lambda: self._do_store_work(work))

    def _store_work_done(self) -> None:
        self._is_storing = False
        self._next_store_work()

    def _do_store_work(self, work: out.StoreWork) -> None:
        match work.work:
            case values.WriteManifest(number):
                self._write_manifest(number)
            case values.MovePointer(pointer):
                self.apply(events.PointerStored(pointer.number))
                self._store_work_done()
            case values.Sweep():
                self._sweep()

    def _write_manifest(self, number: int) -> None:
        checkpoints = self.core.checkpointing.checkpoints
        if checkpoints.under_way != number:
            self._store_work_done()
            return
        model = self.core.declaration.model
        assert model is not None, "a checkpoint is of a model"
        declaration = encode(with_tasks(self.core.declaration, self._queue.task_count))
        manifest = checkpoints.manifest(
            "job",
            model.plan_hash,
            model.cut_for,
            declaration,
            self._queue.encode(),
            self.world.now,
            self.core.evaluations.encode_results(),
            self.witness.seen,
        )
        data = manifest.encode()

        def done() -> None:
            self.apply(events.ManifestWritten(number, checksum(data)))
            self._store_work_done()

        def failed() -> None:
            self.apply(events.ManifestFailed(number, "the store failed"))
            self._store_work_done()

        if "pointer before manifest" in self.flaws:
            self.apply(events.ManifestWritten(number, checksum(data)))
        self.cluster.store.publish(self, manifest_name(number), data, len(data), done, failed)

    def _sweep(self) -> None:
        def listed(sizes: dict[str, int]) -> None:
            self._delete(self.core.checkpointing.checkpoints.deletable(list(sizes)))

        self.cluster.store.list(self, listed, self._store_work_done)

    def _delete(self, names: tuple[str, ...]) -> None:
        if names:
            rest = names[1:]
            self.cluster.store.delete(self, names[0], lambda: self._delete(rest), self._store_work_done)
        else:
            self._store_work_done()


class Text:
    """A text of the core's, put together only when somebody reads it."""

    def __init__(self, text: str, noted: tuple[object, ...]) -> None:
        self._text = text
        self._values = noted

    def __str__(self) -> str:
        return self._text % self._values


def _next_number(pointer: bytes | None) -> int:
    """Of checkpoints, by what is stored of them; None: the job keeps none."""
    return 1 if pointer is None else decode_pointer(pointer).next_number


def _done_at(queue: TaskQueue, report: FinishedTask) -> object:
    """Which batches of the reported task are done."""
    return queue.batches(report.epoch, queue._state.order(report.epoch).at(report.position)).done  # noqa: SLF001
