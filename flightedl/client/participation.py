"""This trainer's part in the job: its tasks, its membership in the view, and the batch that it works on.

Rules:

* A membership is taken between two batches only, and begins with values pulled as its member. Whoever learns that it is
  gone (a push that was refused, an answer of the master, a lease that ended) forgets it; the next batch joins anew.
* The mode is the one that a membership begins under.
* Tasks are fetched on the feed's thread, while the user's thread works on a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flightedl.client.batches import CurrentBatch
from flightedl.client.ending import JobEnd
from flightedl.client.feed import Piece, Reports
from flightedl.client.parameters import Parameters
from flightedl.client.registration import Registration
from flightedl.client.servers import SLICE_S, Servers, persistently
from flightedl.client.waiting import Waiting
from flightedl.domain.modes import Mode
from flightedl.errors import MessageError
from flightedl.formats.chunks import chunks_from_rows
from flightedl.messages.base import decode, encode
from flightedl.messages.tasks import JoinReply, JoinRequest, TasksReply, TasksTicket
from flightedl.rpc.dialogue import Dialogue

_AFTER_ALL = 1 << 62


class Participation:
    """What the dataset and the parameters ask of the session (``BatchListener``, ``Scope``), and the feed (``fetch``).

    Args:
        registration: Who this trainer is.
        servers: Finds the master.
        waiting: Begins a wait of the user's thread.
        began_anew: The registration is another one: what was held under the old one is somebody else's.
        batch_done: A batch of so many records was worked through; whether the model got nothing from it.
        dialogue: Makes a way to ask the master for tasks.
    """

    def __init__(
        self,
        registration: Registration,
        servers: Servers,
        waiting: Callable[[], Waiting],
        began_anew: Callable[[], None],
        batch_done: Callable[[int, bool], None],
        dialogue: Callable[[], Dialogue],
    ) -> None:
        self._registration = registration
        self._servers = servers
        self._waiting = waiting
        self._began_anew = began_anew
        self._batch_done = batch_done
        self._dialogue = dialogue
        self._end = JobEnd(self._ask_once)
        self._parameters: Parameters | None = None
        self._mode: Mode | None = None
        self._current: CurrentBatch | None = None
        self._member = 0
        #: Batches begun under the present membership.
        self._steps = 0
        #: Of the newest batch; above all others when all epochs are done.
        self.epoch = 0

    def take(self, parameters: Parameters, mode: Mode) -> None:
        """The job has parameters, to which batches are pushed from now on."""
        self._parameters, self._mode = parameters, mode

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
        return self._member

    @property
    def current(self) -> CurrentBatch | None:
        """The batch that the user's code works on."""
        return self._current

    def lost_membership(self) -> None:
        """Join again before the next batch is handed out."""
        self._member = 0

    def open_batch(self, current: CurrentBatch) -> bool:
        """Be a member of the view and have values that a member may have."""
        # Taken once: an answer to another request may end the membership at any time.
        while (member := self._member) == 0 and self._parameters is not None:
            if not self._join(self._parameters, current.assignment.attempt):
                return False
            self._parameters.refresh()
        self._steps += 1
        current.step, current.member = self._steps, member
        self._current, self.epoch = current, current.assignment.epoch
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
        self._current, self._member = None, 0
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

    def _join(self, parameters: Parameters, attempt: int) -> bool:
        """Become a member to work on ``attempt``; False when that was taken away."""
        waiting = self._waiting()
        for _ in waiting.steps():
            reply = persistently(self._waiting(), lambda: self._ask_to_join(attempt))
            if reply.member or not reply.holds_work:
                self._take_mode(parameters, reply)
                self._member, self._steps = reply.member, 0
                break
            waiting.because(reply.waiting_for or "the pservers to agree on this trainer's first round")
        waiting.over()
        return self._member != 0

    def _take_mode(self, parameters: Parameters, reply: JoinReply) -> None:
        """A membership begins under the mode of now: between two batches is where it changes."""
        if reply.mode is None or not reply.member:
            return
        mode = Mode.from_json(reply.mode)
        if mode != self._mode:
            self._mode = mode
            parameters.change_mode(mode)

    def _ask_to_join(self, attempt: int) -> JoinReply:
        """One try, under whatever registration there is now: the one before may have ended."""
        self._renew_registration()
        request = JoinRequest(trainer=self.trainer, generation=self.generation, attempt=attempt, wait_s=2.0)
        return decode(self._servers.master().action("join", encode(request), timeout_s=SLICE_S), JoinReply)

    def _renew_registration(self) -> None:
        if self._registration.renewed():
            self._member = 0
            self._began_anew()

    # the tasks

    def require_final(self, index: int, generation: int) -> None:
        """Let a pserver be read; after the job's end only one that has everything. Errors as ``JobEnd``'s."""
        self._end.require_final(index, generation)

    def ask(self, dialogue: Dialogue) -> TasksReply:
        """How far the job is; reports nothing and takes no work."""
        return self.fetch(dialogue, Reports(), (), 0, 0.0)[0]

    def _ask_once(self) -> TasksReply:
        dialogue = self._dialogue()
        try:
            return self.ask(dialogue)
        finally:
            dialogue.rest()

    def fetch(
        self,
        dialogue: Dialogue,
        reports: Reports,
        holding: Sequence[int],
        want: int,
        wait_s: float,
        evaluation: str = "",
    ) -> tuple[TasksReply, list[Piece]]:
        """Report to the master and ask it for work, on the thread whose dialogue it is."""
        self._renew_registration()
        member = self._member
        ticket = TasksTicket(
            trainer=self.trainer,
            generation=self.generation,
            evaluation=evaluation,
            finished=list(reports.finished),
            failed=list(reports.failed),
            returned=list(reports.returned),
            holding=list(holding),
            want=want,
            wait_s=wait_s,
        )
        answer = dialogue.ask(self._servers.master(), encode(ticket), timeout_s=SLICE_S + wait_s)
        reply = decode(answer, TasksReply)
        pieces = [Piece(assignment, chunks_from_rows(assignment.chunks)) for assignment in reply.assignments]
        if not all(piece.chunks for piece in pieces):
            raise MessageError("the master does not say where a task's records are: update flightedl on all machines")
        if not evaluation:
            self._end.heard(reply)
            if reply.outcome == "epochs_done":
                self.epoch = _AFTER_ALL
        if reply.member != member and self._member == member:
            # A new membership begins with fresh values, so it is taken by joining, between two batches.
            self._member = 0
        return reply, pieces
