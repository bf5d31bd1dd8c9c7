"""A simulated trainer: the product's trainer cores, driven by a model of a user's program.

``domain.trainer`` makes the decisions. This module models the registration, the calls to servers, and time. The program
may leave its loop and begin another, raise an error and end, or ignore an error and continue. Its process may be
frozen, or may lose its registration and return under the same name with a new generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from flightedl.domain.model.sharding import ShardPlan
from flightedl.domain.retries import is_transient
from flightedl.domain.trainer.batches import Batch
from flightedl.domain.trainer.ending import JobEnd
from flightedl.domain.trainer.feed import Ask, Reports
from flightedl.domain.trainer.first_values import Elected, FollowedElection
from flightedl.domain.trainer.membership import Denied, Joined, NotYet, TrainerMembership
from flightedl.domain.trainer.steps import Steps
from flightedl.errors import DeadlineError, FlightedlError, UnavailableError
from flightedl.messages.declarations import Placement
from flightedl.messages.tasks import JoinReply, TasksReply
from flightedl.recording.recorded import recorded
from tests.simulation.cores.body import Body
from tests.simulation.cores.etcd import ADDRESS, DECLARATION, INIT, Transaction, claimed, placement_read
from tests.simulation.cores.evaluating import Evaluating
from tests.simulation.cores.first_values import FirstValues
from tests.simulation.cores.job import plan_in
from tests.simulation.cores.loop import Loop
from tests.simulation.cores.worker import Worker
from tests.simulation.cores.world import Action, Process

if TYPE_CHECKING:
    from tests.simulation.cores.cluster import Cluster

LEASE_TTL_S = 2.0
_CALL_S = 2.0
_JOIN_AGAIN_S = 0.1
#: Time for which a loop waits for its last reports after the program has left it.
_CLOSE_S = 4.0


class Trainer(Process):
    """A process that runs a user's program."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster.world, name)
        self.cluster = cluster
        self.fault_scale = cluster.fault_scale
        self.recorder = cluster.recorder("trainer", name)
        #: A separate random generator, so that its draws do not affect others.
        self.own = Random(f"{cluster.world.seed} {name} {cluster.world.events}")
        self._cover_s = cluster.cover_s()
        self.lease = cluster.etcd.grant(self, LEASE_TTL_S)
        self.generation = 0
        self.membership = recorded(self.recorder, {"trainer": name}, TrainerMembership)
        self.membership.has_model(cluster.shape.mode)
        #: The plan that this trainer uses, and the buckets of each pserver.
        self.plan: ShardPlan
        self.buckets: list[range]
        self.steps: Steps
        self.job_end = recorded(self.recorder, {}, JobEnd)
        #: True if the values that this process pulls now are the result of the job.
        self.reads_result = False
        #: Time after which the program gives up on a pserver that does not answer.
        self.give_up_s = self.own.choice((math.inf, 0.1, 0.1, 2.0))
        self.worker = Worker(self)
        #: The loop's body with the current batch.
        self.body: Body | None = None
        #: Election of the initial values of the model on which this process trains.
        self._elected: FollowedElection | None = None
        self.loop: Loop | None = None
        #: Loops that have been left but still have something to report.
        self._left: list[Loop] = []
        self._evaluating: Evaluating | None = None
        self._when_over: Action = lambda: None
        self._is_claiming = False
        cluster.etcd.watch(self, lambda: None)
        self._register(self._await_model, lambda _: self.later(0.3, lambda: self.end("no answer to its claim")))

    def end(self, why: str) -> None:
        """Exit. The supervisor starts another process."""
        self.world.note("{} ends: {}", self.name, why)
        self.cluster.ended(self)

    def describe(self) -> str:
        """Return a human-readable description of this trainer's state."""
        feed = None if self.loop is None else self.loop.feed
        if feed is None:
            return f"{self.name} has no loop"
        held = [task.assignment.attempt for task in feed.held]
        at = None if self.loop is None or self.loop.at is None else self.loop.at.batch
        return f"{self.name} member {self.membership.member} held {held} at {at} trouble {feed.trouble!r}"

    # registration
    def _register(self, then: Action, failed: Callable[[Exception], None]) -> None:
        """Register if necessary, or register again if the lease was lost."""
        if self.generation and self.lease.is_held():
            then()
            return
        if self._is_claiming:
            failed(UnavailableError("it is registering"))
            return
        self._is_claiming = True
        key, etcd = f"trainers/{self.name}", self.cluster.etcd
        lease = etcd.grant(self, LEASE_TTL_S) if self.generation else self.lease
        # Identifies this registration. The key may still belong to the previous registration.
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
        """Notice that the lease is lost. The trainer's work is not affected yet."""
        self.lease.is_lost = True
        if not self.cluster.etcd.is_down and not self.cluster.etcd.is_frozen:
            self.cluster.etcd.revoke(self.lease)

    # the model

    def _await_model(self) -> None:
        """Wait until the model is declared, then take part in the election of its initial values."""
        placement = placement_read(self.directory)
        if DECLARATION in self.cluster.etcd.keys and placement is not None:
            shards = self._adopt(placement)
            about, mode = {"trainer": self.name}, self.cluster.shape.mode
            self.steps = recorded(self.recorder, about, Steps, shards, mode, self.buckets, placement.version)
            FirstValues(self, self._begin).go_on()
        else:
            # A real trainer gets the master's answer once the declaration has been stored.
            self.later(0.3, self._await_model)

    def _adopt(self, placement: Placement) -> list[list[int]]:
        shape = self.cluster.shape
        self.plan = plan = plan_in(placement, shape.cut_for)
        self.buckets = [shape.buckets(plan, index) for index in range(plan.pserver_count)]
        return shape.shards(plan)

    def key_of(self, number: int) -> int:
        """Return the key of a block's gradient. All buckets have the same key, however they are distributed."""
        first = self.cluster.shape.first_bucket
        return number if first is None else min(number, first)

    def now(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers under which the current placement represents these blocks and buckets."""
        keys = {self.key_of(number) for number in numbers}
        return [number for number in self.steps.versions if self.key_of(number) in keys]

    @property
    def knows_newest_placement(self) -> bool:
        """True if this trainer uses the newest placement in its directory."""
        placement = placement_read(self.directory)
        return placement is None or placement.version <= self.plan.placement

    def place(self) -> None:
        """Use the newest known placement of the blocks. No transfer may be in progress."""
        placement = placement_read(self.directory)
        if placement is not None and not self.knows_newest_placement:
            self.steps.place(self._adopt(placement), self.buckets, placement.version)

    def _begin(self, elected: Elected) -> None:
        """Begin to train once the model has its initial values."""
        self._elected = recorded(self.recorder, {}, FollowedElection, elected)
        self.worker.run(self.steps.refresh(self.membership.member), self._begin_loop)

    @property
    def life(self) -> int:
        """Life of the model on which this process trains."""
        return 0 if self._elected is None else self._elected.life

    def require_same_model(self) -> None:
        """Raise BegunAnewError if the model has started over."""
        if self._elected is not None:
            init = self.directory.get(INIT)
            self._elected.require_same(None if init is None else init.created, self.directory_revision)

    def is_of_this_model(self) -> bool:
        """True if the model has not started over. Otherwise end the process."""
        try:
            self.require_same_model()
        except FlightedlError as error:
            if self.is_alive:
                self.end(str(error))
            return False
        return True

    # the master

    def ask_master(self, ask: Ask, answered: Callable[[TasksReply | Exception], None], evaluation: str = "") -> None:
        """Send one of the feed's requests to the master."""

        def send() -> None:
            address = self.directory.get(ADDRESS)
            if not self.is_of_this_model():
                return
            if address is None:
                answered(UnavailableError("there is no master"))
                return
            member = self.membership.member

            def replied(reply: TasksReply | FlightedlError) -> None:
                if isinstance(reply, TasksReply):
                    if not evaluation:
                        self.job_end.replied(reply)
                    self.membership.tasks_answered(member, reply)
                answered(reply)

            ticket = ask.ticket(self.name, self.generation, evaluation, self.steps.round, self.life, self.name)
            late = lambda: answered(DeadlineError("the master did not answer"))  # noqa: E731
            timeout_s = _CALL_S + ask.wait_s
            self.world.call(self, address.value, address.value.tasks, ticket, replied, late, timeout_s=timeout_s)

        self._register(lambda: self.later(0.0, send), lambda error: self.later(0.0, lambda: answered(error)))

    def ask_for_end(self, answered: Callable[[TasksReply | Exception], None]) -> None:
        """Request the job's progress, without sending reports or requesting work."""
        self.ask_master(Ask(Reports(), (), 0, 0.0, 0), answered)

    def ask_to_join(self, attempt: int, answered: Callable[[JoinReply], None]) -> None:
        """Repeat the request to join until it is answered."""

        def again(_: Any = None) -> None:
            self.later(_JOIN_AGAIN_S, lambda: self.ask_to_join(attempt, answered))

        def replied(reply: JoinReply | FlightedlError) -> None:
            if not isinstance(reply, FlightedlError):
                answered(reply)
            elif is_transient(reply):
                again()
            else:
                self.end(f"it may not join: {reply}")

        def send() -> None:
            address = self.directory.get(ADDRESS)
            if address is None:
                again()
            elif self.is_of_this_model():
                request = self.membership.join_request(self.name, self.generation, attempt)
                timeout_s = _CALL_S + request.wait_s
                self.world.call(self, address.value, address.value.join, request, replied, again, timeout_s=timeout_s)

        self._register(send, again)

    # batches

    def open_batch(self, batch: Batch, opened: Action, denied: Action) -> None:
        """Begin a batch: become a member, and pull values that are recent enough for a member."""
        again = lambda: self.open_batch(batch, opened, denied)  # noqa: E731
        begun = self.membership.begin_batch(batch.epoch)
        if begun is not None:
            self.worker.run(self.steps.open_batch(batch, begun.member, begun.step), opened)
            return

        def answered(reply: JoinReply) -> None:
            match self.membership.join_answered(reply):
                case Joined(member, new_mode):
                    self.worker.run(self.steps.joined(member, new_mode), again)
                case NotYet():
                    self.later(_JOIN_AGAIN_S, self.worker.awaiting(again))
                case Denied():
                    denied()

        self.ask_to_join(batch.attempt, self.worker.awaiting(answered))

    def work(self, batch: Batch, then: Action) -> None:
        """Run the loop's body until the program requests the next batch."""
        self.body = Body(self, batch, then)

    def push_sum(self, then: Action) -> None:
        """Push the sum of all waiting batches."""
        self.worker.run(self.steps.push_sum(), then)

    def give_up_sum(self) -> None:
        """Drop the sum. Its batches belong to another trainer or are repeated."""
        self.worker.end(self.steps.give_up_sum())

    # loops

    def _begin_loop(self) -> None:
        def begin() -> None:
            self.loop = Loop(self, self._cover_s)
            self.loop.begin()

        self._evaluate("before", begin)

    def _evaluate(self, name: str, then: Action) -> None:
        """Take part in an evaluation if the program has one."""

        def over() -> None:
            self._evaluating = None
            then()

        if self.cluster.shape.evaluation:
            self._evaluating = Evaluating(self, name, over)
            self._evaluating.begin()
        else:
            then()

    def declare_evaluation(self, name: str, declared: Action) -> None:
        """Declare an evaluation. Retry until a master has accepted it."""

        def again(_: Any = None) -> None:
            self.later(0.2, lambda: self.declare_evaluation(name, declared))

        address = self.directory.get(ADDRESS)
        if address is None:
            again()
        elif self.is_of_this_model():
            replied = lambda reply: again() if isinstance(reply, FlightedlError) else declared()  # noqa: E731
            self.world.call(self, address.value, address.value.declare_evaluation, (name, self.life), replied, again)

    def feed_over(self, loop: Loop) -> None:
        """Record that a loop's feed has sent all of its reports."""
        if loop in self._left:
            self._left.remove(loop)
            self.later(0.0, self._when_over)

    def all_done(self, loop: Loop) -> None:
        """Finish the program after its loop: it reads the result, does something else for a while, and exits."""

        def read(then: Action) -> None:
            self.worker.run(self.steps.pull(list(self.steps.versions), as_reader=True), then)

        def over() -> None:
            self._evaluate("after", lambda: read(lambda: self.end("the job is done")))

        self.reads_result = True
        pause_s = 1.0 + self.own.random()
        read(lambda: self._close(loop, pause_s, over))

    def leave_loop(self, *, is_begun_again: bool, raises: bool) -> None:
        """Leave the loop, possibly because of an error. The program then begins another loop or ends."""
        loop = self.loop
        if loop is None or loop.is_left or self.reads_result:
            return
        if raises:
            loop.fail()
        loop.leave()
        self.body = None
        self.worker.drop()
        then = self._go_on if is_begun_again else lambda: self.end("its program is over")
        self._close(loop, 2.0 * self.own.random(), then)

    def drain(self) -> None:
        """Handle SIGTERM: the program leaves its loop or evaluation, and returns its tasks."""
        if self._evaluating is None:
            self.leave_loop(is_begun_again=False, raises=False)
        else:
            self._close(self._evaluating, self.own.random(), lambda: self.end("its program is over"))

    def _close(self, loop: Loop, pause_s: float, then: Action) -> None:
        """Close a loop some time later. Wait for its last reports, but only for a limited time."""
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
        self.worker.abandon_batch()
        self._begin_loop()

    def swallow_error(self) -> None:
        """Make the current call of the loop body fail with an error that the program ignores."""
        if self.body is not None:
            self.body.fail(UnavailableError("gave up"))
