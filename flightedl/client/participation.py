"""This trainer's part in the job: its tasks, its membership in the view, and the batch that it works on.

What a membership is and when it is over is decided by ``domain.trainer.membership``. Tasks are fetched on the feed's
thread, while the user's thread works on a batch.
"""

from __future__ import annotations

from collections.abc import Callable

from flightedl.client.connections import SLICE_S, Servers, persistently
from flightedl.client.ending import JobEnd
from flightedl.client.model.parameters import Parameters
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waiting
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.domain.trainer.feed import Ask, Reports
from flightedl.domain.trainer.membership import Denied, Joined, NotYet, TrainerMembership
from flightedl.errors import MessageError
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import JoinReply, TasksReply
from flightedl.rpc.request_stream import RequestStream


class Participation:
    """What the dataset and the parameters ask of the session (``BatchListener``, ``Scope``), and the feed (``fetch``).

    Args:
        registration: Who this trainer is.
        servers: Finds the master.
        waiting: Begins a wait of the user's thread.
        began_anew: The registration is another one: what was held under the old one is somebody else's.
        batch_done: A batch of so many records was worked through; whether the model got nothing from it.
        requests: Makes a way to ask the master for tasks.
    """

    def __init__(
        self,
        registration: Registration,
        servers: Servers,
        waiting: Callable[[], Waiting],
        began_anew: Callable[[], None],
        batch_done: Callable[[int, bool], None],
        requests: Callable[[], RequestStream],
    ) -> None:
        self._registration = registration
        self._servers = servers
        self._waiting = waiting
        self._began_anew = began_anew
        self._batch_done = batch_done
        self._request_stream = requests
        self._end = JobEnd(self._ask_once)
        self._parameters: Parameters | None = None
        self._current: CurrentBatch | None = None
        self._membership = TrainerMembership()

    def take(self, parameters: Parameters, mode: Mode) -> None:
        """The job has parameters, to which batches are pushed from now on."""
        self._parameters = parameters
        self._membership.has_model(mode)

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
    def member(self) -> int:
        """This trainer's membership in the view; 0: none."""
        return self._membership.member

    @property
    def epoch(self) -> int:
        """Of the newest batch; above all others when all epochs are done."""
        return self._membership.epoch

    @property
    def current(self) -> CurrentBatch | None:
        """The batch that the user's code works on."""
        return self._current

    def lost_membership(self) -> None:
        """Join again before the next batch is handed out."""
        self._membership.lost()

    def open_batch(self, current: CurrentBatch) -> bool:
        """Be a member of the view and have values that a member may have."""
        while not self._membership.begin_batch(current):
            assert self._parameters is not None, "there is nobody to wait for without parameters"
            if not self._join(self._parameters, current):
                return False
            self._parameters.refresh()
        self._current = current
        return True

    def close_batch(self, current: CurrentBatch) -> None:
        """Answer for the blocks that the user's code did not push to."""
        self._current = None
        if self._parameters is not None:
            if current.must_repeat:
                self._parameters.leave_out(current)
            else:
                self._parameters.arrive(current)
        if not current.must_repeat:
            is_idle = self._parameters is not None and not current.has_gradient
            self._batch_done(current.record_count, is_idle)

    def abandon_batch(self) -> None:
        """The loop was left in its midst: the next batch is opened under a membership of its own.

        Some blocks may have the batch and others not, and some values may be newer than others.
        """
        self._current = None
        self._membership.lost()
        self.give_up_sum()

    def push_sum(self) -> None:
        """Push what the trainer has added up and not pushed yet."""
        if self._parameters is not None:
            self._parameters.push_sum()

    def give_up_sum(self) -> None:
        """Forget what the trainer has added up and not pushed yet."""
        if self._parameters is not None:
            self._parameters.give_up_sum()

    # the membership

    def _join(self, parameters: Parameters, current: CurrentBatch) -> bool:
        """Become a member to work on this batch; False when that was taken away."""
        waiting = self._waiting()
        for _ in waiting.steps():
            reply = persistently(self._waiting(), lambda: self._ask_to_join(current))
            match self._membership.join_answered(reply):
                case Joined(new_mode):
                    if new_mode is not None:
                        parameters.change_mode(new_mode)
                    waiting.over()
                    return True
                case Denied():
                    break
                case NotYet(waiting_for):
                    waiting.because(waiting_for)
        waiting.over()
        return False

    def _ask_to_join(self, current: CurrentBatch) -> JoinReply:
        """One try, under whatever registration there is now: the one before may have ended."""
        self._renew_registration()
        request = self._membership.join_request(self.trainer, self.generation, current)
        return decode(self._servers.master().action("join", encode(request), timeout_s=SLICE_S), JoinReply)

    def _renew_registration(self) -> None:
        if self._registration.renewed():
            self._membership.lost()
            self._began_anew()

    # the tasks

    def require_final(self, index: int, generation: int) -> None:
        """Let a pserver be read; after the job's end only one that has everything. Errors as ``JobEnd``'s."""
        self._end.require_final(index, generation)

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
        member = self.member
        ticket = ask.ticket(self.trainer, self.generation, evaluation)
        answer = requests.ask(self._servers.master(), encode(ticket), timeout_s=SLICE_S + ask.wait_s)
        reply = decode(answer, TasksReply)
        if not all(assignment.chunks for assignment in reply.assignments):
            raise MessageError("the master does not say where a task's records are: update flightedl on all machines")
        if not evaluation:
            self._end.heard(reply)
            if reply.outcome == "epochs_done":
                self._membership.all_done()
        self._membership.tasks_answered(member, reply)
        return reply
