"""This trainer's part in the job: its tasks, its membership in the view, and the batch that it works on.

What is sent and asked for is decided by ``domain.trainer``: here are the master's answers and the threads. Tasks are
fetched on the feed's thread, while the user's thread works on a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from flightedl.client.connections import SLICE_S, Servers, persistently
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
from flightedl.rpc.request_stream import RequestStream


class Participation:
    """What the dataset and the parameters ask of the session (``Scope``), and the feed (``fetch``).

    Args:
        registration: Who this trainer is.
        servers: Finds the master.
        waiting: Begins a wait of the user's thread.
        began_anew: The registration is another one: what was held under the old one is somebody else's.
        batch_done: A batch of so many records was worked through; whether the model got nothing from it.
        requests: Makes a way to ask the master for tasks.
        membership: Decides about it; None: a new one.
        end: Knows of the job's end; None: a new one.
    """

    def __init__(
        self,
        registration: Registration,
        servers: Servers,
        waiting: Callable[[], Waiting],
        began_anew: Callable[[], None],
        batch_done: Callable[[int, bool], None],
        requests: Callable[[], RequestStream],
        membership: TrainerMembership | None = None,
        end: JobEnd | None = None,
    ) -> None:
        self._registration = registration
        self._servers = servers
        self._waiting = waiting
        self._began_anew = began_anew
        self._batch_done = batch_done
        self._request_stream = requests
        self._end = JobEnd() if end is None else end
        self._parameters: Parameters | None = None
        #: Called before the first batch.
        self.before_batches: Callable[[], object] = lambda: None
        self._current: CurrentBatch | None = None
        #: Where the time of the loop goes.
        self.probe = StepProbe(float)
        #: In the view.
        self.membership = TrainerMembership() if membership is None else membership

    def take(self, parameters: Parameters, mode: Mode) -> None:
        """The job has parameters, to which batches are pushed from now on."""
        self._parameters = parameters
        self.membership.has_model(mode)

    @property
    def trainer(self) -> str:
        """This trainer's id."""
        return self._registration.trainer

    @property
    def generation(self) -> int:
        """This trainer's generation."""
        return self._registration.generation

    # the batch

    @property
    def epoch(self) -> int:
        """Of the newest batch; above all others when all epochs are done."""
        return self.membership.epoch

    @property
    def current(self) -> CurrentBatch | None:
        """The batch that the user's code works on."""
        return self._current

    def open_batch(self, batch: Batch, place: Callable[[], str]) -> bool:
        """Be a member of the view and have values that a member may have; False: the work was taken away."""
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
        """None: the work was taken away."""
        assert self._parameters is not None, "without a model there is nothing to join"
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
        """Answer for the blocks that the user's code did not push to; return the batches that have changed."""
        self.probe.turn(DATA)
        parameters, current = self._parameters, self._current
        assert current is not None, "a batch is open"
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
        """The user says that a batch of data without a model is done; False: another trainer does it."""
        self.probe.turn(PUSH)
        self._current = None
        if is_counted:
            self._batch_done(batch.record_count, False)
        self.probe.turn(DATA)

    def abandon_batch(self) -> None:
        """The loop was left in the midst of a batch."""
        self.probe.turn("")
        self._current = None
        if self._parameters is not None:
            self._parameters.abandon_batch()

    def push_sum(self) -> Sequence[BatchState]:
        """Push what the trainer has added up and not pushed yet; return the batches that have changed."""
        return () if self._parameters is None else self._parameters.push_sum()

    def give_up_sum(self) -> Sequence[BatchState]:
        """Forget what the trainer has added up and not pushed yet; return the batches that have changed."""
        return () if self._parameters is None else self._parameters.give_up_sum()

    def loop_over(self) -> None:
        """Read the final values, for as long as a pserver may be away. Errors as of ``Parameters.pull``."""
        self.probe.turn("")
        if self._parameters is not None:
            self._parameters.pull()

    # the membership

    def _ask_to_join(self, attempt: int) -> JoinReply:
        """One try, under whatever registration there is now: the one before may have ended."""
        self._renew_registration()
        request = self.membership.join_request(self.trainer, self.generation, attempt)
        return decode(self._servers.master().action("join", encode(request), timeout_s=SLICE_S), JoinReply)

    def require_lease(self) -> None:
        """Register again if the lease has ended, where no pserver would refuse what this trainer does without one.

        Raises:
            UnavailableError: etcd was not reachable for too long.
        """
        if self._parameters is None and not self._registration.held.is_held:
            persistently(self._waiting(), self._renew_registration)

    def _renew_registration(self) -> None:
        if self._registration.renewed():
            self.membership.lost()
            self._began_anew()

    # the tasks

    def require_final(self, index: int, generation: int) -> None:
        """Let a pserver be read; after the job's end only one that has everything.

        Raises:
            NotReadyError: it is not known yet whether it has; look for the pserver again.
            BegunAnewError: what it lacks is done again.
            FlightedlError: the master cannot be asked.
        """
        if not self._end.may_read(index, generation):
            self._end.require(self._ask_once(), index, generation)

    def ask(self, requests: RequestStream) -> TasksReply:
        """How far the job is; reports nothing and takes no work."""
        return self.fetch(requests, Ask(Reports(), (), 0, 0.0, 0))

    def _ask_once(self) -> TasksReply:
        requests = self._request_stream()
        try:
            return self.ask(requests)
        finally:
            requests.close_idle()

    def fetch(self, requests: RequestStream, ask: Ask, evaluation: str = "") -> TasksReply:
        """Report to the master and ask it for work, on the thread whose stream it is."""
        self._renew_registration()
        member = self.membership.member
        round_ = 0 if self._parameters is None else self._parameters.steps.round
        servers = self._servers
        ticket = ask.ticket(self.trainer, self.generation, evaluation, round_, servers.life if evaluation else 0)
        master = servers.master()
        with tracing.asks("master", "tasks", master.address):
            if traceparent := tracing.carried():
                ticket = replace(ticket, traceparent=traceparent)
            answer = requests.ask(master, encode(ticket), timeout_s=SLICE_S + ask.wait_s)
        reply = decode(answer, TasksReply)
        if not all(assignment.chunks for assignment in reply.assignments):
            raise MessageError("the master does not say where a task's records are: update flightedl on all machines")
        if not evaluation:
            self._end.heard(reply)
            if reply.outcome == "epochs_done":
                self.membership.all_done()
        self.membership.tasks_answered(member, reply)
        return reply
