"""A simulated master, which drives the product's core with a modeled etcd, store and network.

The core makes all decisions. The driver passes events to it, and carries out each effect once the state on which the
effect is based has been stored. Writes happen one at a time. Each write stores everything that has changed, provided
that the lock's generation and the revisions of the overwritten values are as expected. A write with an unknown outcome
is repeated unchanged until it is known to have happened or to be impossible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.core import MasterCore
from flightedl.domain.master.stored import Found, StoredKeys, Write
from flightedl.domain.master.stored_moves import StoredKey, StoredMoves, moves_in
from flightedl.domain.moving import values as moving
from flightedl.domain.queue.tasks import TaskQueue
from flightedl.domain.queue.values import Effect, Expired, Quarantined
from flightedl.domain.recovery.lives import name_in
from flightedl.errors import FlightedlError, NotReadyError
from flightedl.messages.checkpoints import CheckpointRequest
from flightedl.messages.declarations import EvaluationDeclaration
from flightedl.messages.moving import MovedRequest
from flightedl.messages.scaling import ScaleRequest
from flightedl.messages.tasks import (
    JoinReply,
    JoinRequest,
    ModeRequest,
    StopRequest,
    TasksReply,
    TasksTicket,
)
from tests.simulation.cores.etcd import (
    ADDRESS,
    INIT,
    LOCK,
    POINTER,
    STATE,
    Transaction,
    claimed,
    pservers_in,
    state_in,
    stored_moves_in,
)
from tests.simulation.cores.links import PserverLink
from tests.simulation.cores.store_worker import StoreWorker
from tests.simulation.cores.taking_over import TakingOver
from tests.simulation.cores.world import Action, Process, Reply

if TYPE_CHECKING:
    from tests.simulation.cores.cluster import Cluster

LEASE_TTL_S = 2.0
_TICK_S = 0.5
_DRAIN_S = 5.0


class Master(Process):
    """A master process. It stands by, takes the lock, continues from the stored state, and leads until deposed."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.flaws = cluster.flaws
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.generation = 0
        self.is_leading = False
        self.core: MasterCore
        self.recorder = cluster.recorder("master", name)
        self.durable = -1
        self._stored_keys = StoredKeys({})
        self._stored_moves = StoredMoves(0)
        self._is_writing = False
        self._is_ready = False
        self._when_durable: list[tuple[int, Action]] = []
        #: Call -> callback to which the answer is passed.
        self._calls: dict[int, Reply] = {}
        self._call_count = 0
        self._links: list[PserverLink] = []
        #: True until the number of added files has been stored.
        self._is_growing = False
        self._store_work = StoreWorker(self)
        cluster.etcd.watch(self, self._look_around)
        self.later(0.05 * cluster.world.random.random(), self._claim)

    def end(self, why: str) -> None:
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
                self.follow(TakingOver(self).steps())
            else:
                self.later(0.3, self._claim)

        etcd = self.cluster.etcd
        transaction = Transaction(created={LOCK: 0}, puts={LOCK: self}, lease=self.lease)
        self.world.call(self, etcd, etcd.transact, transaction, answered, lambda: self.end("no answer to its claim"))

    def lead(self, core: MasterCore, found: Found, placed_at: int) -> None:
        """Publish the master's address once its first state is stored.

        Args:
            core: The master's core.
            found: The state's keys in etcd, by name.
            placed_at: Revision at which the placement was last written; 0 if it is not stored.
        """
        self.core, self._stored_keys = core, StoredKeys(found)
        self._stored_moves = StoredMoves(placed_at)
        self._is_ready = True
        self.cluster.account.watch(self)

        def publish() -> None:
            transaction = Transaction(
                created={LOCK: self.generation}, puts={ADDRESS: self}, lease=self.lease, writer=self.generation
            )

            def answered(result: Any) -> None:
                if result[0]:
                    etcd.has_gone_back = False
                    self.is_leading = True
                    self._follow(self.core.pservers.count)
                    self._look_around()
                    self._tick()
                else:
                    self.end("the lock was lost before it led")

            etcd = self.cluster.etcd
            self.world.call(self, etcd, etcd.transact, transaction, answered, lambda: self.later(0.2, publish))

        # Write the first state even if it is unchanged, because only then does the model count as declared.
        self._write()
        self.after_stored(core.revision, publish)

    def is_held(self) -> bool:
        """True if this master may still act. Otherwise end it."""
        if not self.lease.is_held():
            self.end("its lease could not be renewed")
            return False
        return True

    # events and effects

    def apply(self, event: events.Event) -> None:
        self.carry_out(self.core.apply(event, self.world.now))

    def carry_out(self, effects: list[out.Effect]) -> None:
        self._write()
        for effect in effects:
            match effect:
                case out.Answer(call, reply, revision):
                    if (answer := self._calls.pop(call, None)) is not None:
                        self._answer(answer, reply, revision)
                case out.WakePserver(index):
                    self._follow(index + 1)
                    self._links[index].wake()
                case out.StoreMoves(transaction, revision):
                    self.after_stored(revision, lambda of=transaction: self._store_moves(of))  # type: ignore[misc]
                case out.StoreWork():
                    self._store_work.do(effect)
                case out.DeleteElection(step, revision):
                    self.after_stored(revision, lambda step=step: self._delete_election(step))  # type: ignore[misc]
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
        if isinstance(reply, JoinReply):
            self.cluster.account.check_member(self, reply.member)
        self.after_stored(revision, lambda: answer(reply))

    def _ask(self, request: events.Request, reply: Reply, *, is_last: bool = False) -> None:
        """Pass a request to the core, and the core's answer to ``reply``."""
        self._call_count += 1
        call = self._call_count
        self._calls[call] = reply
        self.apply(events.Asked(call, request, is_last))
        if call in self._calls:
            self.later(
                getattr(request, "wait_s", 0.0),
                lambda: self.apply(events.WaitEnded(call)) if call in self._calls else None,
            )

    # storage

    def after_stored(self, revision: int, action: Action) -> None:
        if self.durable >= revision:
            action()
        else:
            self._when_durable.append((revision, action))

    def _write(self) -> None:
        if not self._is_writing and self.durable < self.core.revision and self.is_alive:
            self._is_writing = True
            # Wait until the event has been handled completely, so that a single write contains all of its decisions.
            self.later(0.0, self._write_now)

    def _write_now(self) -> None:
        self.core.check()
        values = self.core.encode() | {"tasks": str(self.queue.task_count).encode()}
        write = self._stored_keys.next_write(values)
        if write is None:
            self._stored(self.core.revision)
        else:
            self._send(write, self.core.revision)

    @property
    def queue(self) -> TaskQueue:
        assert self.core.work is not None, "a master that has begun has a queue"
        return self.core.work.queue

    def _send(self, write: Write, revision: int) -> None:
        if not self.is_held():
            return
        etcd = self.cluster.etcd
        compared = {STATE + name: at for name, at in write.compared.items()}
        fence = {} if "writes are not fenced" in self.flaws else {LOCK: self.generation}
        puts = {STATE + name: value for name, value in write.puts.items()}
        transaction = Transaction(created=fence, modified=compared, puts=puts, writer=self.generation)

        def answered(result: Any) -> None:
            committed, at, found = result
            lock = found.get(LOCK)
            if committed:
                etcd.has_gone_back = False
                self._stored_keys.committed(write, at)
                self._stored(revision)
            elif lock is None or lock.created != self.generation:
                self.end("another master holds the lock")
            elif self._stored_keys.adopt(write, state_in({key: each for key, each in found.items() if each})):
                self._stored(revision)
            else:
                self.end("another process wrote its state")

        def failed() -> None:
            self.later(0.1, lambda: self._send(write, revision))

        self.world.call(self, etcd, etcd.transact, transaction, answered, failed, timeout_s=1.0)

    def _stored(self, revision: int) -> None:
        self.durable = revision
        self._is_writing = False
        self.cluster.account.state_stored(self)
        ready = [action for wanted, action in self._when_durable if wanted <= revision]
        self._when_durable = [entry for entry in self._when_durable if entry[0] > revision]
        for action in ready:
            if self.is_alive:
                action()
        self._write()

    # moves of blocks

    def _store_moves(self, transaction: moving.Transaction) -> None:
        """Execute a transaction until its outcome is known."""
        write = self._stored_moves.write_of(transaction)
        latest = {POINTER: self._stored_keys.revision_of("checkpoints")} if transaction.excludes_checkpoint else {}
        pservers = {f"ps/{index}": generation for index, generation in transaction.generations}
        fence = {LOCK: self.generation}
        self._execute_moves(
            transaction,
            Transaction(
                created=fence | pservers | write.created,
                modified=write.modified | latest,
                puts=write.puts,
                deletes=write.deletes,
            ),
        )

    def _execute_moves(self, moves: moving.Transaction, transaction: Transaction) -> None:
        if not self.is_held():
            return
        etcd = self.cluster.etcd

        def again(_: Any = None) -> None:
            self.later(0.1, lambda: self._execute_moves(moves, transaction))

        def answered(result: Any) -> None:
            committed, revision, found = result
            lock = found.get(LOCK)
            if committed:
                self.apply(self._stored_moves.committed(moves, revision))
            elif lock is None or lock.created != self.generation:
                self.end("another master holds the lock")
            else:
                self._read_moves()

        self.world.call(self, etcd, etcd.transact, transaction, answered, again, timeout_s=1.0)

    def _read_moves(self) -> None:
        etcd = self.cluster.etcd

        def read(found: tuple[StoredKey | None, StoredKey | None, int]) -> None:
            self.apply(self._stored_moves.rejected(*found))

        again = lambda: self.later(0.1, self._read_moves)  # noqa: E731
        self.world.call(self, etcd, etcd.read_moves, None, read, again, timeout_s=1.0)

    def scale(self, request: ScaleRequest, reply: Reply) -> None:
        """Handle a request to change the pservers. Replies with the progress or an error."""
        if self._may_answer(reply):
            self._ask(request, reply)

    def moved(self, request: MovedRequest, reply: Reply) -> None:
        """Handle the acknowledgement of a unit that a pserver has staged."""
        if self._may_answer(reply):
            self._ask(request, reply)

    # processes

    def _follow(self, count: int) -> None:
        """Call all pservers with lower indexes."""
        while len(self._links) < count:
            self._links.append(PserverLink(self, len(self._links)))
            if self.is_leading:
                self._links[-1].talk()

    def _look_around(self) -> None:
        if not self._is_ready:
            if LOCK not in self.directory and not self.generation:
                self._claim()
            return
        if not self.is_leading:
            return
        trainers = {k.removeprefix("trainers/"): v.created for k, v in self.directory.items() if k.startswith("train")}
        pservers = {index: key.created for index, key in pservers_in(self.directory).items()}
        self._follow(max(pservers, default=-1) + 1)
        for link in self._links:
            link.looked_around()
        revision = max((key.modified for key in self.directory.values()), default=0)
        self.apply(events.LeasesSeen(trainers, pservers, revision))
        self.apply(moves_in(*stored_moves_in(self.directory), self.directory_revision))

    def _tick(self) -> None:
        if self.is_held():
            self.later(_TICK_S, self._tick)
            self._look_for_files()
            self.apply(events.StatusReceived([link.status for link in self._links]))
            # Trainers report their progress without delay, because a delay would not affect the master's decisions.
            progressed, self.cluster.progressed = tuple(sorted(self.cluster.progressed)), set()
            self.apply(events.TimePassed(progressed))

    def _look_for_files(self) -> None:
        """Add new files to the dataset step by step, as a real master does."""
        if not self.queue.is_growing or self._is_growing:
            return
        cluster = self.cluster
        joined, batch_counts = cluster.joined, cluster.shape.batch_counts
        event: events.Event
        if self.queue.task_count < joined:
            event = events.FilesJoined(joined, batch_counts.__getitem__)
        elif joined == len(batch_counts):
            event = events.GrowthEnded()
        else:
            return
        self._is_growing = True

        def stored() -> None:
            self._is_growing = False

        self.apply(event)
        self.after_stored(self.core.revision, stored)

    def stop(self) -> None:
        for trainer, generation in sorted(self.core.trainers.items())[:1]:
            request = StopRequest(trainer=trainer, generation=generation, reason="the simulation")
            self._ask(request, lambda _: None)

    def drain(self) -> None:
        """Handle SIGTERM: write a last checkpoint, if this is possible within the time limit."""
        self.later(_DRAIN_S, lambda: self.end("it was told to end"))
        if self.is_leading:
            self._drain(None)

    def _drain(self, ticket: int | None) -> None:
        request = CheckpointRequest(ticket=ticket, reason="the master is about to end", wait_s=1.0)

        def replied(reply: Any) -> None:
            if isinstance(reply, FlightedlError) or self.core.checkpointing.checkpoints.is_over(reply.ticket):
                self.end("it was told to end, and a checkpoint has everything")
            else:
                self.later(0.1, lambda: self._drain(reply.ticket))

        self._ask(request, replied, is_last=True)

    # the model

    def _delete_election(self, step: Any) -> None:
        self.world.note("{} lets the model start over: {}", self.name, step)
        self.cluster.begun_anew += 1
        created = {LOCK: self.generation, INIT: step.election} | {f"ps/{i}": g for i, g in step.generations.items()}
        etcd = self.cluster.etcd
        transaction = Transaction(created=created, deletes=(INIT,))
        self.world.call(self, etcd, etcd.transact, transaction, lambda _: None, lambda: None)

    # trainers

    def _may_answer(self, reply: Reply) -> bool:
        """True if this master leads. Otherwise reject the request, or end silently if the lease has expired."""
        if not self.is_leading:
            reply(NotReadyError("this master does not lead"))
        return self.is_leading and self.is_held()

    def tasks(self, ticket: TasksTicket, reply: Reply) -> None:
        """Handle reports and a request for work. Replies with a ``TasksReply`` or an error."""
        if not self._may_answer(reply):
            return
        if ticket.evaluation and self.core.evaluations.known(ticket.evaluation) is not None:
            self._begin_evaluation(ticket.evaluation)

        def answer(answered: Any) -> None:
            if isinstance(answered, TasksReply):
                evaluation = name_in(ticket.life, ticket.evaluation) if ticket.evaluation else ""
                for assignment in answered.assignments:
                    self.cluster.account.given(ticket.trainer, evaluation, assignment)
                if answered.outcome == "epochs_done" and not ticket.evaluation:
                    self.cluster.account.check_done(self, answered.pservers)
            reply(answered)

        self._ask(ticket, answer)

    def declare_evaluation(self, wanted: tuple[str, int], reply: Reply) -> None:
        """Declare an evaluation. The first declaration starts it. Replies when the start is stored or has failed."""
        if not self._may_answer(reply):
            return
        name, life = wanted
        dataset = self.cluster.shape.declared_evaluation().declaration
        declared = EvaluationDeclaration(name=name, dataset=dataset, life=life)

        def begin(answered: Any) -> None:
            if isinstance(answered, out.Undeclared):
                self._begin_evaluation(name)
                self._ask(declared, reply)
            else:
                reply(answered)

        self._ask(declared, begin)

    def _begin_evaluation(self, name: str) -> None:
        """Index the data of an evaluation, unless this master already has. Here, indexing takes no time."""
        known, shape = self.core.evaluations.known(name), self.cluster.shape
        if known is None or (known.work is None and not known.is_done):
            self.apply(events.EvaluationIndexed(name, shape.declared_evaluation(), shape.evaluation_settings()))

    def join(self, request: JoinRequest, reply: Reply) -> None:
        """Handle a trainer's request to become a member. Replies with a ``JoinReply`` or an error."""
        if self._may_answer(reply):
            self._ask(request, reply)

    def change_mode(self, mode: Mode) -> None:
        self.world.note("{} is asked for the mode {}", self.name, mode)
        request = ModeRequest(mode=mode.to_json(), wait_s=0.0)
        self._ask(request, lambda _: None)


class Text:
    """A message from the core, which is formatted only when it is read."""

    def __init__(self, text: str, noted: tuple[object, ...]) -> None:
        self._text = text
        self._values = noted

    def __str__(self) -> str:
        return self._text % self._values
