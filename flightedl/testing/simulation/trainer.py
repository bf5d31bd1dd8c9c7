"""A trainer of the simulated cluster: takes work, joins, pulls, pushes to every pserver, reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flightedl.domain.accumulation import BatchGroup
from flightedl.domain.batches import Batch
from flightedl.domain.modes import Async, Mode, Sync
from flightedl.domain.tasks_sharing import count_to_ask_for
from flightedl.errors import FencedError, FlightedlError
from flightedl.messages.tasks import (
    Assignment,
    FinishedTask,
    JoinReply,
    JoinRequest,
    ReturnedTask,
    TasksReply,
    TasksTicket,
)
from flightedl.testing.simulation.etcd import ADDRESS, DONE, INIT, STATE, Transaction, claimed
from flightedl.testing.simulation.job import blocks_of
from flightedl.testing.simulation.pserver import PullRequest, Push
from flightedl.testing.simulation.world import Process

if TYPE_CHECKING:
    from flightedl.testing.simulation.cluster import Cluster

LEASE_TTL_S = 2.0


@dataclass(slots=True)
class Work:
    """The piece that is being trained."""

    assignment: Assignment
    batch: int
    #: Batches whose gradients are added up.
    group: BatchGroup[int]
    #: Sums that are pushed again, before anything else.
    again: list[tuple[int, ...]] = field(default_factory=list)
    #: Lowest generation of each pserver that acknowledged any of its batches.
    generations: dict[int, int] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether the present batch is the piece's last."""
        return self.batch + 1 == self.assignment.end_batch


class Trainer(Process):
    """One process of a user's program."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.flaws = cluster.flaws
        #: That its membership began under.
        self.mode: Mode = cluster.shape.mode
        #: How many batches it adds up in async mode: each as it likes, because pservers take any sum.
        self._patience = cluster.push_every()
        self._wanted = cluster.wanted()
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.generation = 0
        self.member = 0
        self.step = 0
        self.held: dict[int, Assignment] = {}
        self.ready: list[Assignment] = []
        self.reports: list[FinishedTask] = []
        self.returned: list[ReturnedTask] = []
        self.work: Work | None = None
        self.versions: dict[int, int] = dict.fromkeys(range(cluster.shape.block_count), 0)
        #: Rises with each new doing: late answers to an older one are not heard.
        self.token = 0
        self._left: set[int] = set()
        #: The batches that are being pushed, and the places of those that a block lacks which refused their sum.
        self._pushing: tuple[int, ...] = ()
        self._refusals: set[tuple[int, ...]] = set()
        self._is_fetching = False
        self._pushing_as = 0
        #: Whose first values the model has that it works on.
        self.election = 0
        self._has_seen_election = False
        cluster.etcd.watch(self, lambda: None)
        self._claim()

    @property
    def is_sync(self) -> bool:
        """Whether there are rounds to wait for."""
        return isinstance(self.mode, Sync)

    @property
    def push_every(self) -> int:
        """How many batches are pushed as one."""
        return self._patience if isinstance(self.mode, Async) else 1

    def end(self, why: str) -> None:
        """Exit; the supervisor starts another one."""
        self.world.note("{} ends: {}", self.name, why)
        self.cluster.ended(self)

    def _claim(self) -> None:
        key = f"trainers/{self.name}"

        def answered(result: Any) -> None:
            if generation := claimed(result, key, self):
                self.generation = generation
                self._stand()
            elif self.lease.is_lost:
                self.end("its lease was lost before it was registered")
            else:
                self.later(0.3, self._claim)

        etcd = self.cluster.etcd
        transaction = Transaction(created={key: 0}, puts={key: self}, lease=self.lease)
        self.world.call(self, etcd, etcd.transact, transaction, answered, lambda: self.end("no answer to its claim"))

    # first values

    def _stand(self) -> None:
        """Give the model its first values, or hear that somebody has."""
        if not self.lease.is_held():
            self.end("its lease was lost before it had a model")
            return
        init = self.directory.get(INIT)
        if init is not None and init.value == DONE:
            self.election = init.created
            self._fetch()
        elif init is not None and init.value is self:
            self._upload(init.created)
        elif init is not None or STATE not in self.cluster.etcd.keys:
            # A master has answered that the model is declared, which it does when that is stored; nobody watches it.
            self.later(0.3, self._stand)
        else:
            etcd = self.cluster.etcd
            transaction = Transaction(created={INIT: 0}, puts={INIT: self}, lease=self.lease)

            def again(_: Any = None) -> None:
                self.later(0.1, self._stand)

            self.world.call(self, etcd, etcd.transact, transaction, again, again)

    def _upload(self, election: int) -> None:
        """Send them to all pservers, then say so, if these are still there."""
        cluster, etcd = self.cluster, self.cluster.etcd
        keys = {f"ps/{index}": self.directory.get(f"ps/{index}") for index in range(cluster.pserver_count)}
        left = set(keys)
        self.token += 1
        token = self.token

        def again(_: Any = None) -> None:
            if self.token == token:
                self.token += 1
                self.later(0.3, self._stand)

        def given(name: str) -> None:
            left.discard(name)
            if not left and self.token == token:
                named = {name: key.created for name, key in present.items()}
                done = Transaction(created={INIT: election, **named}, puts={INIT: DONE})
                self.world.call(self, etcd, etcd.transact, done, again, again)

        present = {name: key for name, key in keys.items() if key is not None}
        if len(present) < len(keys):
            again()
            return
        for name, key in present.items():
            message = (key.created, election)
            self.world.call(self, key.value, key.value.initialize, message, lambda _, n=name: given(n), again)  # type: ignore[misc]

    def _is_of_this_model(self) -> bool:
        """False: the model begins anew, and this process ends."""
        init = self.directory.get(INIT)
        self._has_seen_election = self._has_seen_election or (init is not None and init.created == self.election)
        if (init is None and self._has_seen_election) or (init is not None and init.created > self.election):
            self.end("the model begins anew")
            return False
        return True

    # work

    def _fetch(self) -> None:
        """Report and ask for more, when there is anything to say."""
        if self._is_fetching or not self._is_of_this_model():
            return
        if not self.lease.is_held():
            self.end("its lease was lost")
            return
        want = count_to_ask_for(self._wanted, len(self.held))
        if not self.reports and not self.returned and not want:
            return
        address = self.directory.get(ADDRESS)
        if address is None:
            self.later(0.3, self._fetch)
            return
        self._is_fetching = True
        ticket = TasksTicket(
            trainer=self.name,
            generation=self.generation,
            finished=list(self.reports),
            returned=list(self.returned),
            holding=list(self.held),
            want=want,
            wait_s=0.0,
        )

        def answered(reply: TasksReply | FlightedlError) -> None:
            self._is_fetching = False
            if isinstance(reply, FencedError):
                self.end("its registration has ended")
            elif isinstance(reply, FlightedlError):
                self.later(0.2, self._fetch)
            else:
                self._take(ticket, reply)
                self.later(0.01 if reply.assignments else 0.3, self._fetch)

        def failed() -> None:
            self._is_fetching = False
            self.later(0.2, self._fetch)

        self.world.call(self, address.value, address.value.tasks, ticket, answered, failed)

    def _take(self, ticket: TasksTicket, reply: TasksReply) -> None:
        self.reports = [report for report in self.reports if report not in ticket.finished]
        self.returned = [piece for piece in self.returned if piece not in ticket.returned]
        for lost in reply.lost:
            self.held.pop(lost.attempt, None)
        if self.member != reply.member:
            self.member = 0
        for assignment in reply.assignments:
            self.cluster.given(self, assignment)
            if assignment.attempt not in self.held:
                self.held[assignment.attempt] = assignment
                self.ready.append(assignment)
        if self.work is None:
            self._next_piece()

    def _next_piece(self) -> None:
        self.work = None
        self.token += 1
        while self.ready:
            assignment = self.ready.pop(0)
            if assignment.attempt in self.held:
                self.work = self._begin_work(assignment)
                self._open_batch()
                return
        self._fetch()

    def _begin_work(self, assignment: Assignment) -> Work:
        return Work(assignment, assignment.first_batch, BatchGroup(self.push_every))

    def _open_batch(self) -> None:
        """Be a member, have values, then push, or add up."""
        self.token += 1
        assert self.work is not None
        if self.work.assignment.attempt not in self.held:
            self._next_piece()
        elif not self.lease.is_held():
            self.end("its lease was lost")
        elif not self._is_of_this_model():
            return
        elif self.member == 0:
            self._join()
        else:
            self.step += 1
            self._push_or_add(self.work)

    def _push_or_add(self, work: Work) -> None:
        if work.again:
            self._push_all(work.again[0])
        elif self.push_every == 1:
            self._push_all((work.batch,))
        else:
            if work.batch not in work.group.members:
                work.group.add(work.batch)
            is_forgotten = work.is_last and "reported before the sum is pushed" in self.flaws
            if work.group.is_full or (work.is_last and not is_forgotten):
                self._push_all(work.group.members)
            else:
                self._pushing = ()
                self._batch_done()

    def _again(self) -> None:
        """The same batch, as a new member and with fresh values."""
        self.member = 0
        if self.work is not None and self._pushing and self._pushing == self.work.group.members:
            self.work.again = list(self.work.group.settle((), is_lost=True).again)
        self._pushing = ()
        self._open_batch()

    def _join(self) -> None:
        assert self.work is not None
        attempt = self.work.assignment.attempt
        token = self.token
        address = self.directory.get(ADDRESS)

        def retry() -> None:
            if self.token == token:
                self.later(0.1, lambda: self._open_batch() if self.token == token else None)

        if address is None:
            self.later(0.3, retry)
            return

        def answered(reply: JoinReply | FlightedlError) -> None:
            if self.token != token:
                return
            if isinstance(reply, FencedError):
                self.end("its registration has ended")
            elif isinstance(reply, FlightedlError):
                retry()
            elif not reply.holds_work:
                # Of this attempt only: what was fetched meanwhile is another one.
                self._hand_back(attempt)
                self._next_piece()
            elif reply.member:
                assert reply.mode is not None
                self.member = reply.member
                self.step = 0
                self._take_mode(Mode.from_json(reply.mode))
                self._pull(dict.fromkeys(self.versions, 0), self._open_batch)
            else:
                retry()

        request = JoinRequest(trainer=self.name, generation=self.generation, attempt=attempt, wait_s=1.0)
        self.world.call(self, address.value, address.value.join, request, answered, retry)

    def _hand_back(self, attempt: int) -> None:
        if (a := self.held.pop(attempt, None)) is not None:
            self.returned.append(ReturnedTask(epoch=a.epoch, position=a.position, attempt=a.attempt))

    def _take_mode(self, mode: Mode) -> None:
        """Between two batches. What was added up under another mode is done again, each batch for itself."""
        if mode != self.mode and self.work is not None:
            again = list(self.work.group.clear())
            if again and self.work.batch not in again:
                again.append(self.work.batch)
            known = [batch for batches in self.work.again for batch in batches]
            self.work.again = [(batch,) for batch in (*known, *(batch for batch in again if batch not in known))]
            self.work.group = BatchGroup(self._patience if isinstance(mode, Async) else 1)
        self.mode = mode

    # values

    def _pull(  # noqa: C901 - one conversation with each pserver
        self, wanted: dict[int, int], then: Any
    ) -> None:
        self.token += 1
        token = self.token
        left = dict(wanted)
        cluster = self.cluster
        #: As of now: a membership that is gone meanwhile is answered so, where a reader would wait for ever.
        member = self.member
        if not member:
            then()
            return

        def ask(index: int) -> None:  # noqa: C901
            numbers = blocks_of(cluster.pserver_count, cluster.shape.cut_for, index)
            mine = tuple((number, left[number]) for number in numbers if number in left)
            if self.token != token or not mine:
                return
            key = self.directory.get(f"ps/{index}")
            if not self._is_of_this_model():
                return
            if key is None or not self.lease.is_held():
                self.later(0.3, lambda: ask(index) if self.lease.is_held() else self.end("its lease was lost"))
                return

            def answered(reply: Any) -> None:
                if self.token != token:
                    return
                if reply[0] == "not member":
                    self._again()
                    return
                if reply[0] == "pulled":
                    for number, version in reply[1]:
                        self.versions[number] = version
                        left.pop(number, None)
                    if not left:
                        then()
                        return
                    if self.work is not None and self.work.assignment.attempt not in self.held:
                        self._next_piece()
                        return
                self.later(0.05 if reply[0] == "pulled" else 0.3, lambda: ask(index))

            request = PullRequest(member, key.created, mine)
            self.world.call(
                self, key.value, key.value.pull, request, answered, lambda: self.later(0.1, lambda: ask(index))
            )

        for index in range(cluster.pserver_count):
            ask(index)

    # gradients

    def _push_all(self, batches: tuple[int, ...]) -> None:
        self.token += 1
        self._pushing_as = self.member
        self._pushing, self._refusals = batches, set()
        self._left = set(self.versions)
        for index in range(self.cluster.pserver_count):
            self._push(index, self.token)

    def _push(  # noqa: C901 - one conversation with a pserver
        self, index: int, token: int
    ) -> None:
        work, cluster = self.work, self.cluster
        if self.token != token or work is None:
            return
        numbers = blocks_of(cluster.pserver_count, cluster.shape.cut_for, index)
        mine = [number for number in numbers if number in self._left]
        if not mine:
            return
        if not self.lease.is_held():
            self.end("its lease was lost")
            return
        if not self._is_of_this_model():
            return
        if work.assignment.attempt not in self.held:
            # Taken away: what is left of it is dropped.
            self._next_piece()
            return
        key = self.directory.get(f"ps/{index}")
        if key is None:
            self.later(0.3, lambda: self._push(index, token))
            return
        assignment = work.assignment

        def answered(reply: Any) -> None:
            if self.token != token:
                return
            if reply[0] != "pushed":
                self.later(0.2, lambda: self._push(index, token))
                return
            if any(outcome not in {"done", "partly"} for _, outcome, _ in reply[1]):
                self._again()
                return
            for _, outcome, lacking in reply[1]:
                if outcome == "partly" and "a refused sum counts as taken" not in self.flaws:
                    self._refusals.add(lacking)
            generation = min(key.created, work.generations.get(index, key.created))
            work.generations[index] = key.created if "newest generation is reported" in self.flaws else generation
            self._left.difference_update(number for number, _, _ in reply[1])
            if "done before ack" in self.flaws:
                self._left.clear()
            if not self._left:
                self._batch_done()
            elif any(number in self._left for number in numbers):
                self._push(index, token)

        push = Push(
            self.name,
            self.generation,
            self._pushing_as,
            key.created,
            tuple(Batch(assignment.epoch, assignment.task, batch) for batch in self._pushing),
            assignment.batch_count,
            tuple((number, self.versions[number], 1.0) for number in mine),
            self.step,
        )
        self.world.call(
            self, key.value, key.value.push, push, answered, lambda: self.later(0.1, lambda: self._push(index, token))
        )

    def _batch_done(self) -> None:
        work = self.work
        assert work is not None
        self.token += 1
        base = dict(self.versions)
        is_last = work.is_last
        self._settle_sum(work)
        if work.again:
            self._pull(dict.fromkeys(base, 0), self._open_batch)
            return
        if is_last:
            assignment = work.assignment
            if self.held.pop(assignment.attempt, None) is not None:
                # A pserver without blocks acknowledges nothing; its present generation will do.
                pservers = [
                    work.generations.get(index, self._present(index)) for index in range(self.cluster.pserver_count)
                ]
                self.reports.append(
                    FinishedTask(
                        epoch=assignment.epoch,
                        position=assignment.position,
                        attempt=assignment.attempt,
                        pservers=pservers,
                    )
                )
            self._fetch()
        wanted = {number: version + 1 if self.is_sync else 0 for number, version in base.items()}

        def next_batch() -> None:
            if is_last:
                self._next_piece()
            else:
                work.batch += 1
                self._open_batch()

        if is_last and not self.ready:
            # Nothing to train on: nobody waits for fresh values.
            self._next_piece()
        else:
            if is_last:
                self.work = None
                self._begin_next(wanted)
                return
            self._pull(wanted, next_batch)

    def _settle_sum(self, work: Work) -> None:
        if work.again and self._pushing == work.again[0]:
            again: BatchGroup[int] = BatchGroup(len(self._pushing))
            for batch in self._pushing:
                again.add(batch)
            work.again[:1] = again.settle(self._refusals, is_lost=False).again
        elif self._pushing == work.group.members:
            work.again = list(work.group.settle(self._refusals, is_lost=False).again)
        self._pushing = ()

    def _begin_next(self, wanted: dict[int, int]) -> None:
        """Fresh values first, then the next piece."""
        while self.ready and self.ready[0].attempt not in self.held:
            self.ready.pop(0)
        if not self.ready:
            self._next_piece()
            return
        assignment = self.ready.pop(0)
        self.work = self._begin_work(assignment)
        if self.member == 0:
            self._open_batch()
        else:
            self._pull(wanted, self._open_batch)

    def _present(self, index: int) -> int:
        key = self.directory.get(f"ps/{index}")
        return 0 if key is None else key.created
