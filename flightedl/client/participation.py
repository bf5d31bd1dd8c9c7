"""This trainer's participation in its job: tasks, membership in the view, and the current batch.

``domain.trainer`` decides what to send and request; this module makes the calls to the master. The feed's thread
fetches tasks while the user's thread works on a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from flightedl.client.connections import SLICE_S, Servers, persistently
from flightedl.client.data.losses import LostData
from flightedl.client.model.parameters import Parameters
from flightedl.client.probe import DATA, PUSH, SCRIPT, StepProbe
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.trainer.batches import Batch, BatchState, CurrentBatch
from flightedl.domain.trainer.ending import JobEnd
from flightedl.domain.trainer.feed import Ask, Reports
from flightedl.domain.trainer.membership import Begun, Denied, Joined, NotYet, TrainerMembership
from flightedl.errors import MessageError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import JoinReply, TasksReply
from flightedl.process import tracing
from flightedl.process.fork_guard import GUARD
from flightedl.rpc.request_stream import RequestStream


class Participation:
    """Interface of the session for the dataset and the parameters and for the feed (``fetch``).

    Args:
        registration: This trainer's registration.
        servers: Connections to the servers.
        waiting: Begins a wait of the user's thread.
        reregistered: Called when the registration has changed: everything held under the old one is lost.
        batch_done: Called with a finished batch's number of records, and True if the batch did not change the model.
        requests: Returns a new connection for requesting tasks.
        membership: State machine of the membership; None to create one.
        end: The trainer's knowledge of the job's end; None to create it.
    """

    def __init__(
        self,
        registration: Registration,
        servers: Servers,
        waiting: Callable[[], Waiting],
        reregistered: Callable[[], None],
        batch_done: Callable[[int, bool], None],
        requests: Callable[[], RequestStream],
        membership: TrainerMembership | None = None,
        end: JobEnd | None = None,
    ) -> None:
        self._registration = registration
        self._servers = servers
        self._waiting = waiting
        self._reregistered = reregistered
        self._batch_done = batch_done
        self._request_stream = requests
        self._end = JobEnd() if end is None else end
        #: Data that was set aside, once all epochs are done.
        self.lost = LostData()
        self._parameters: Parameters | None = None
        #: Called before the first batch.
        self.before_batches: Callable[[], object] = lambda: None
        self._current: CurrentBatch | None = None
        #: Measures the time that the loop spends in each activity.
        self.probe = StepProbe(float)
        self.membership = TrainerMembership() if membership is None else membership

    def set_model(self, parameters: Parameters, mode: Mode) -> None:
        """Use these parameters for pushes from now on."""
        self._parameters = parameters
        self.membership.has_model(mode)

    @property
    def trainer(self) -> str:
        return self._registration.trainer

    @property
    def generation(self) -> int:
        return self._registration.generation

    # the batch

    @property
    def epoch(self) -> int:
        """Epoch of the most recent batch. When all epochs are done, it is higher than any epoch."""
        return self.membership.epoch

    @property
    def current(self) -> CurrentBatch | None:
        return self._current

    def open_batch(self, batch: Batch, place: Callable[[], str]) -> bool:
        """Join the view if necessary, and open the batch. Return False if the master has revoked its task."""
        GUARD.check()
        self.probe.turn(DATA)
        if self._parameters is None:
            self.before_batches()
        parameters = self._parameters
        begun = self.membership.begin_batch(batch.epoch) or self._begun_after_joining(batch)
        if begun is None:
            return False
        if parameters is None:
            current = CurrentBatch.of(batch, begun.member, begun.step)
        else:
            parameters.open_batch(batch, begun)
            current = parameters.steps.current or CurrentBatch.of(batch)
        current.place = place
        self._current = current
        self.probe.turn(SCRIPT)
        return True

    def _begun_after_joining(self, batch: Batch) -> Begun | None:
        """Join the view and open the batch. Return None if the master has revoked its task."""
        assert self._parameters is not None, "a trainer joins only for a model"
        begun: Begun | None = None
        waiting: Waiting | None = None
        try:
            while begun is None:
                reply = persistently(self._waiting(), lambda: self._ask_to_join(batch.attempt))
                match self.membership.join_answered(reply):
                    case Joined(member, new_mode):
                        self._parameters.joined(member, new_mode)
                        begun = self.membership.begin_batch(batch.epoch)
                    case NotYet(waiting_for):
                        waiting = waiting or self._waiting()
                        waiting.because(waiting_for)
                        waiting.pause()
                    case Denied():
                        return None
        finally:
            if waiting is not None:
                waiting.over()
        return begun

    def close_batch(self) -> Sequence[BatchState]:
        GUARD.check()
        self.probe.turn(DATA)
        parameters, current = self._parameters, self._current
        assert current is not None, "no batch is open"
        states: Sequence[BatchState] = ()
        if parameters is not None:
            parameters.batch_ends(current)
        self._current = None
        if parameters is not None:
            states = parameters.close_batch()
        if not current.must_repeat:
            self._batch_done(current.record_count, parameters is not None and not current.has_gradient)
        return states

    def batch_done(self, batch: Batch, *, is_counted: bool) -> None:
        """In a job without a model, record that the user acknowledged a batch. Ignored if its task was revoked."""
        self.probe.turn(PUSH)
        self._current = None
        if is_counted:
            self._batch_done(batch.record_count, False)
        self.probe.turn(DATA)

    def abandon_batch(self) -> None:
        self.probe.turn("")
        self._current = None
        if self._parameters is not None:
            self._parameters.abandon_batch()

    def push_sum(self) -> Sequence[BatchState]:
        return () if self._parameters is None else self._parameters.push_sum()

    def give_up_sum(self) -> Sequence[BatchState]:
        return () if self._parameters is None else self._parameters.give_up_sum()

    def loop_over(self) -> None:
        """Pull the final values. Raises the same errors as ``Parameters.pull``."""
        self.probe.turn("")
        if self._parameters is not None:
            self._parameters.pull()

    # the membership

    def _ask_to_join(self, attempt: int) -> JoinReply:
        """Make one attempt to join the view under the current registration."""
        self._renew_registration()
        request = self.membership.join_request(self.trainer, self.generation, attempt)
        return decode(self._servers.master().action("join", encode(request), timeout_s=SLICE_S), JoinReply)

    def require_lease(self) -> None:
        """Register again if the lease has ended, unless a model exists: its pservers would reject this trainer.

        Raises:
            UnavailableError: etcd was unreachable for too long.
        """
        GUARD.check()
        if self._parameters is None and not self._registration.held.is_held:
            persistently(self._waiting(), self._renew_registration)

    def _renew_registration(self) -> None:
        if self._registration.renewed():
            self.membership.lost()
            self._reregistered()

    # the tasks

    def require_final(self, index: int, generation: int) -> None:
        """Require that this pserver has the final values. Called for values that are read after the job's end.

        Raises:
            NotReadyError: the answer is not known yet. Look up the pserver again.
            BegunAnewError: the pserver lacks batches, which are being repeated.
            FlightedlError: the request to the master failed.
        """
        if not self._end.may_read(index, generation):
            self._end.require(self._ask_once(), index, generation)

    def ask(self, requests: RequestStream) -> TasksReply:
        """Request the job's state from the master, without reporting or requesting tasks."""
        return self.fetch(requests, Ask(Reports(), (), 0, 0.0, 0))

    def _ask_once(self) -> TasksReply:
        requests = self._request_stream()
        try:
            return self.ask(requests)
        finally:
            requests.close_idle()

    def fetch(self, requests: RequestStream, ask: Ask, evaluation: str = "") -> TasksReply:
        """Send reports and a request for tasks to the master. Only the thread that owns ``requests`` may call this."""
        self._renew_registration()
        member = self.membership.member
        round_ = 0 if self._parameters is None else self._parameters.steps.round
        servers = self._servers
        life = servers.life if evaluation else 0
        ticket = ask.ticket(self.trainer, self.generation, evaluation, round_, life, self._registration.witness)
        master = servers.master()
        with tracing.asks("master", "tasks", master.address):
            if traceparent := tracing.carried():
                ticket = replace(ticket, traceparent=traceparent)
            answer = requests.ask(master, encode(ticket), timeout_s=SLICE_S + ask.wait_s)
        reply = decode(answer, TasksReply)
        if not all(assignment.chunks for assignment in reply.assignments):
            raise MessageError("the master sends no file positions for a task: update flightedl on all machines")
        if not evaluation:
            self._end.replied(reply)
            if reply.outcome == "epochs_done":
                self.membership.all_done()
                self.lost = LostData(reply.lost_records, reply.failed, tuple(reply.lost_places))
        self.membership.tasks_answered(member, reply)
        return reply
