"""A trainer of the simulated cluster: the product's trainer cores, around a program that meets with what programs do.

What it is is decided by ``domain.trainer``; here is a registration, a way to the servers, and time. Its program may
leave its loop and begin another, raise and end, or swallow an error and go on; its process may be frozen, or lose its
registration and come back under the same name with a new generation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import TYPE_CHECKING, Any

from flightedl.domain.consistency.modes import Async, Mode
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.feed import Ask
from flightedl.domain.trainer.membership import Denied, Joined, NotYet, TrainerMembership
from flightedl.domain.trainer.retries import is_transient
from flightedl.domain.trainer.sums import BatchSums
from flightedl.errors import DeadlineError, FlightedlError, UnavailableError
from flightedl.messages.tasks import JoinReply, TasksReply
from flightedl.testing.simulation.etcd import ADDRESS, DONE, INIT, STATE, Transaction, claimed
from flightedl.testing.simulation.evaluating import Evaluating
from flightedl.testing.simulation.loop import Loop
from flightedl.testing.simulation.transfers import Transfer
from flightedl.testing.simulation.world import Action, Process

if TYPE_CHECKING:
    from flightedl.testing.simulation.cluster import Cluster

LEASE_TTL_S = 2.0
_CALL_S = 2.0
#: A loop that is left waits so long for its last reports.
_CLOSE_S = 4.0


class Trainer(Process):
    """One process of a user's program."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.fault_scale = cluster.fault_scale
        self.recorder = cluster.recorder("trainer", name)
        #: Of its own, so that what is drawn from it changes nothing else.
        self.own = Random(f"{cluster.world.seed} {name} {cluster.world.events}")  # noqa: S311 - repeatable on purpose
        #: How many batches it adds up in async mode: each as it likes, because pservers take any sum.
        self._push_every = cluster.push_every()
        self._cover_s = cluster.cover_s()
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.generation = 0
        self.membership = TrainerMembership()
        self._take_mode(cluster.shape.mode)
        self.membership.has_model(self.mode)
        self.versions: dict[int, int] = dict.fromkeys(range(cluster.shape.block_count), 0)
        self.loop: Loop | None = None
        #: Those that were left and have something to report.
        self._left: list[Loop] = []
        self._evaluating: Evaluating | None = None
        self._when_over: Action = lambda: None
        self._transfer: Transfer | None = None
        #: What the loop's body works on, and what is about to be handed to it.
        self._current: CurrentBatch | None = None
        self._opening: CurrentBatch | None = None
        self._is_claiming = False
        #: Rises with each upload: late answers to an older one are not heard.
        self._upload_number = 0
        #: Whose first values the model has that it works on.
        self.election = 0
        self._has_seen_election = False
        cluster.etcd.watch(self, lambda: None)
        self._register(self._stand, lambda _: self.later(0.3, lambda: self.end("no answer to its claim")))

    def end(self, why: str) -> None:
        """Exit; the supervisor starts another one."""
        self.world.note("{} ends: {}", self.name, why)
        self.cluster.ended(self)

    def describe(self) -> str:
        """What it is at, for people."""
        feed = None if self.loop is None else self.loop.feed
        if feed is None:
            return f"{self.name} has no loop"
        held = [task.assignment.attempt for task in feed.held]
        at = None if self.loop is None or self.loop.at is None else self.loop.at.current
        return f"{self.name} member {self.membership.member} held {held} at {at} trouble {feed.trouble!r}"

    # its registration

    def _register(self, then: Action, failed: Callable[[Exception], None]) -> None:
        """Register, also again when the lease was lost."""
        if self.generation and self.lease.is_held():
            then()
            return
        if self._is_claiming:
            failed(UnavailableError("it is registering"))
            return
        self._is_claiming = True
        key, etcd = f"trainers/{self.name}", self.cluster.etcd
        lease = etcd.grant(self, LEASE_TTL_S) if self.generation else self.lease
        # Of this registration only: the one before may still have the key.
        claim = object()

        def answered(result: Any) -> None:
            self._is_claiming = False
            if not (generation := claimed(result, key, claim)):
                refused()
                return
            is_again = self.generation > 0
            self.lease, self.generation = lease, generation
            if is_again:
                self.world.note("{} has registered again, generation {}", self.name, generation)
                self.membership.lost()
                for loop in (*self._left, *(each for each in (self.loop, self._evaluating) if each)):
                    loop.registered_again()
            then()

        def refused() -> None:
            self._is_claiming = False
            etcd.revoke(lease)
            failed(UnavailableError("the lease before has not ended yet"))

        transaction = Transaction(created={key: 0}, puts={key: claim}, lease=lease)
        self.world.call(self, etcd, etcd.transact, transaction, answered, refused)

    def lose_registration(self) -> None:
        """It notices that its lease is lost; it does not know yet what that means for its work."""
        self.lease.is_lost = True
        if not self.cluster.etcd.is_down and not self.cluster.etcd.is_frozen:
            self.cluster.etcd.revoke(self.lease)

    # first values

    def _stand(self) -> None:
        """Give the model its first values, or hear that somebody has."""
        if not self.lease.is_held():
            self.end("its lease was lost before it had a model")
            return
        init = self.directory.get(INIT)
        if init is not None and init.value == DONE:
            self.election = init.created
            self._begin_loop()
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
        self._upload_number += 1
        number = self._upload_number

        def again(_: Any = None) -> None:
            if self._upload_number == number:
                self._upload_number += 1
                self.later(0.3, self._stand)

        def given(name: str) -> None:
            left.discard(name)
            if not left and self._upload_number == number:
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

    def is_of_this_model(self) -> bool:
        """False: the model begins anew, and this process ends."""
        init = self.directory.get(INIT)
        self._has_seen_election = self._has_seen_election or (init is not None and init.created == self.election)
        if (init is None and self._has_seen_election) or (init is not None and init.created > self.election):
            if self.is_alive:
                self.end("the model begins anew")
            return False
        return True

    # the master

    def ask_master(self, ask: Ask, answered: Callable[[TasksReply | Exception], None], evaluation: str = "") -> None:
        """One exchange of the feed."""

        def send() -> None:
            address = self.directory.get(ADDRESS)
            if not self.is_of_this_model():
                return
            if address is None:
                answered(UnavailableError("there is no master"))
                return
            member = self.membership.member

            def heard(reply: TasksReply | FlightedlError) -> None:
                if isinstance(reply, TasksReply) and not evaluation:
                    self.membership.tasks_answered(member, reply)
                answered(reply)

            ticket = ask.ticket(self.name, self.generation, evaluation)
            late = lambda: answered(DeadlineError("the master did not answer"))  # noqa: E731
            timeout_s = _CALL_S + ask.wait_s
            self.world.call(self, address.value, address.value.tasks, ticket, heard, late, timeout_s=timeout_s)

        self._register(lambda: self.later(0.0, send), lambda error: self.later(0.0, lambda: answered(error)))

    def open_batch(self, current: CurrentBatch, opened: Action, denied: Action) -> None:
        """Be a member, with values that a member may have."""
        self._opening = current
        self._open(current, opened, denied)

    def _open(  # noqa: C901 - one conversation with the master
        self, current: CurrentBatch, opened: Action, denied: Action
    ) -> None:
        if current is not self._opening:
            return
        if self.membership.begin_batch(current):
            opened()
            return

        def again(_: Any = None) -> None:
            self.later(0.1, lambda: self._open(current, opened, denied))

        def heard(reply: JoinReply | FlightedlError) -> None:
            if current is not self._opening:
                return
            if isinstance(reply, FlightedlError):
                again() if is_transient(reply) else self.end(f"it may not join: {reply}")
                return
            match self.membership.join_answered(reply):
                case Joined(new_mode):
                    if new_mode is not None:
                        self.give_up_sum()
                        self._take_mode(new_mode)
                    self._pull(dict.fromkeys(self.versions, 0), lambda: self._open(current, opened, denied))
                case Denied():
                    denied()
                case NotYet():
                    again()

        self._register(lambda: self._ask_to_join(current, heard, again), again)

    def _ask_to_join(self, current: CurrentBatch, heard: Callable[[Any], None], again: Action) -> None:
        address = self.directory.get(ADDRESS)
        if address is None:
            again()
        elif self.is_of_this_model():
            request = self.membership.join_request(self.name, self.generation, current)
            timeout_s = _CALL_S + request.wait_s
            self.world.call(self, address.value, address.value.join, request, heard, again, timeout_s=timeout_s)

    # batches

    def _take_mode(self, mode: Mode) -> None:
        self.mode = mode
        is_summing = isinstance(mode, Async) and self._push_every > 1
        self._sums = BatchSums(self._push_every) if is_summing else None

    def _pull(self, wanted: dict[int, int], then: Action) -> None:
        self._transfer = Transfer(self, None, wanted, self.membership.member, False, lambda _: then())

    def work(self, current: CurrentBatch, then: Action) -> None:
        """The loop's body: compute, push, and have the values that follow."""

        def push() -> None:
            if current is not self._current:
                return
            if self._sums is None:
                self._transfer = Transfer(self, current, {}, current.member, True, lambda _: then())
                return
            self._sums.complete(current)
            self._sums.check()
            if self._sums.is_full:
                self.push_sum(then)
            else:
                then()

        self._current = current
        self.later(0.02 * self.own.random(), push)

    def push_sum(self, then: Action) -> None:
        """All batches that wait, as one push."""
        sums = self._sums
        if sums is None or not sums.has_batches:
            then()
            return
        together = sums.take({})

        def done(refusals: Collection[tuple[int, ...]]) -> None:
            sums.settle(together, refusals)
            then()

        self._transfer = Transfer(self, together, {}, together.member, True, done)

    def give_up_sum(self) -> None:
        """Its batches are somebody else's, or are done again."""
        if self._sums is not None:
            self._sums.give_up()

    # loops

    def _begin_loop(self) -> None:
        def begin() -> None:
            self.loop = Loop(self, self._cover_s)
            self.loop.begin()

        self._evaluate("before", begin)

    def _evaluate(self, name: str, then: Action) -> None:
        """Do a part of an evaluation, where the program has any."""

        def over() -> None:
            self._evaluating = None
            then()

        if self.cluster.shape.evaluation:
            self._evaluating = Evaluating(self, name, over)
            self._evaluating.begin()
        else:
            then()

    def declare_evaluation(self, name: str, declared: Action) -> None:
        """Until a master has taken it."""

        def again(_: Any = None) -> None:
            self.later(0.2, lambda: self.declare_evaluation(name, declared))

        address = self.directory.get(ADDRESS)
        if address is None:
            again()
        elif self.is_of_this_model():
            heard = lambda reply: again() if isinstance(reply, FlightedlError) else declared()  # noqa: E731
            self.world.call(self, address.value, address.value.declare_evaluation, name, heard, again)

    def feed_over(self, loop: Loop) -> None:
        """A feed has said all that it had to say."""
        if loop in self._left:
            self._left.remove(loop)
            self.later(0.0, self._when_over)

    def all_done(self, loop: Loop) -> None:
        """The loop has ended by itself; the program does something else for a while, and ends."""

        def over() -> None:
            self._evaluate("after", lambda: self.end("all is done"))

        self._close(loop, 1.0 + self.own.random(), over)

    def leave_loop(self, *, is_begun_again: bool, raises: bool) -> None:
        """The program leaves its loop, now or with an error; then it begins another, or ends."""
        loop = self.loop
        if loop is None or loop.is_left:
            return
        if raises:
            loop.fail()
        loop.leave()
        self._give_up_transfer()
        then = self._go_on if is_begun_again else lambda: self.end("its program is over")
        self._close(loop, 2.0 * self.own.random(), then)

    def told_to_end(self) -> None:
        """SIGTERM: its program leaves its loop, or its evaluation, and hands back what it holds."""
        if self._evaluating is None:
            self.leave_loop(is_begun_again=False, raises=False)
        else:
            self._close(self._evaluating, self.own.random(), lambda: self.end("its program is over"))

    def _close(self, loop: Loop, pause_s: float, then: Action) -> None:
        """Some time later; wait for its last reports, but not for ever."""
        self._left.append(loop)
        is_through = False

        def through() -> None:
            nonlocal is_through
            if not is_through:
                is_through = True
                self._when_over = lambda: None
                then()

        def close() -> None:
            self._when_over = through
            loop.close()
            if loop.is_over:
                through()
            else:
                self.later(_CLOSE_S, through)

        self.later(pause_s, close)

    def _go_on(self) -> None:
        self.membership.lost()
        self.give_up_sum()
        self._begin_loop()

    def _give_up_transfer(self) -> None:
        self._current = self._opening = None
        if self._transfer is not None:
            self._transfer.give_up()

    def swallow_error(self) -> None:
        """A push fails, of which the program takes no notice."""
        transfer, sums, loop = self._transfer, self._sums, self.loop
        current = None if loop is None or loop.at is None or loop.is_left else loop.at.current
        if transfer is None or transfer.is_over or current is None or current is not self._current:
            return
        assert loop is not None
        transfer.give_up()
        error = UnavailableError("gave up")
        if sums is not None:
            sums.push_failed(error)
        else:
            current.push_failed(error)
        loop.go_on()
