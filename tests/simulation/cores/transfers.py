"""Driver of a simulated trainer's ``Transfer``: the messages to the pservers, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flightedl.domain.exactly_once.accumulation import applied_bits
from flightedl.domain.trainer import transfers as core
from flightedl.errors import (
    DeadlineError,
    FlightedlError,
    NotReadyError,
    ReplacedError,
    StalePlacementError,
    UnavailableError,
)
from flightedl.messages.parameters import Outcome
from flightedl.messages.tasks import TasksReply
from tests.simulation.cores.job import Gradient, batch_of
from tests.simulation.cores.pserver import PullRequest, Push
from tests.simulation.cores.world import Action

if TYPE_CHECKING:
    from tests.simulation.cores.trainer import Trainer

_RETRY_S = 0.1
_REFUSALS: dict[str, FlightedlError] = {
    "fenced": ReplacedError("another process has this index"),
    "not ready": NotReadyError("the pserver has no values yet"),
    "moved": StalePlacementError("the blocks have moved, or are about to move"),
}


class Travel:
    """A transfer in progress, to all pservers in parallel.

    Args:
        trainer: The sender.
        transfer: The messages.
        gradients: Block -> its gradient. Other blocks that are pushed to get the batch's arrival.
        done: Called when the transfer has succeeded.
        failed: Called with the error when the transfer has failed.
    """

    def __init__(
        self,
        trainer: Trainer,
        transfer: core.Transfer,
        gradients: Mapping[int, Gradient],
        done: Action,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._trainer = trainer
        self._transfer = transfer
        self._gradients = gradients
        self._done = done
        self._failed = failed
        self._open = {index for index, call in enumerate(transfer.calls) if call is not None}
        self._is_given_up = False
        self._error: BaseException | None = None
        #: Pserver -> time at which its calls began to fail.
        self._trouble_since: dict[int, float] = {}

    def begin(self) -> None:
        """Call all pservers."""
        for index, call in enumerate(self._transfer.calls):
            if call is not None:
                self._ask(index, call)

    def give_up(self) -> None:
        """Ignore all further answers."""
        self._is_given_up = True

    def _ask(self, index: int, call: core.Call) -> None:
        """Call the process that now holds the index, without retrying."""
        trainer = self._trainer
        if self._is_given_up:
            return
        try:
            trainer.require_same_model()
            key = trainer.directory.get(f"ps/{index}")
            if key is None:
                raise NotReadyError(f"nobody holds index {index}")
        except FlightedlError as error:
            self._heard(index, 0, (), error)
            return
        if self._transfer.batch is None and not trainer.job_end.may_read(index, key.created):
            self._look_at_end(index, call, key)
        else:
            self._call(index, call, key)

    def _look_at_end(self, index: int, call: core.Call, key: Any) -> None:
        """Call this process only after the master has confirmed that the process has everything."""

        def handle_answers(reply: TasksReply | Exception) -> None:
            try:
                if isinstance(reply, Exception):
                    raise reply
                self._trainer.job_end.require(reply, index, key.created)
            except FlightedlError as error:
                self._heard(index, key.created, (), error)
            else:
                self._call(index, call, key)

        self._trainer.ask_for_end(handle_answers)

    def _call(self, index: int, call: core.Call, key: Any) -> None:
        trainer = self._trainer
        generation = key.created

        def late() -> None:
            self._heard(index, generation, (), DeadlineError(f"{key.value.name} did not answer"))

        def answered(reply: Any) -> None:
            if (refusal := _REFUSALS.get(reply[0])) is not None:
                self._heard(index, generation, (), refusal)
            elif not self._is_given_up:
                misplaced = _REFUSALS["moved"] if reply[0] == "pushed" and reply[2] else None
                self._heard(index, generation, self._answers(key.value, call, reply), misplaced)

        match call:
            case core.Push():
                trainer.world.call(trainer, key.value, key.value.push, self._push(index, call, key), answered, late)
            case core.Pull(wanted):
                pairs = [(each, wanted[number]) for number in wanted for each in self._meant(index, number)]
                request = PullRequest(self._transfer.member, generation, tuple(sorted(pairs)))
                trainer.world.call(trainer, key.value, key.value.pull, request, answered, late)

    def _meant(self, index: int, number: int) -> range:
        """Return the pserver's blocks that are represented by one block number in the core."""
        buckets = self._trainer.buckets[index]
        return buckets if number in buckets else range(number, number + 1)

    def _push(self, index: int, call: core.Push, key: Any) -> Push:
        batch = self._transfer.batch
        assert batch is not None, "a batch is pushed"
        return Push(
            self._trainer.name,
            self._trainer.generation,
            self._transfer.member,
            key.created,
            tuple(map(batch_of, (batch.identity, *batch.others))),
            batch.identity.batch_count,
            tuple(
                (each, call.bases[number], self._gradients.get(self._trainer.key_of(number), {}))
                for number in call.blocks
                for each in self._meant(index, number)
            ),
            float(batch.weight),
            batch.step,
        )

    def _answers(self, pserver: Any, call: core.Call, reply: Any) -> list[core.Answer]:
        """Return a reply's answers in the form that the core expects."""
        kind, *rows = reply
        if kind == "pushed":
            assert self._transfer.batch is not None, "a batch is pushed"
            count = 1 + len(self._transfer.batch.others)
            return [
                core.Answer(
                    number, number + 1, outcome, None, applied_bits(place not in lacking for place in range(count))
                )
                for number, outcome, lacking in rows[0]
            ]
        if kind == "not member":
            assert isinstance(call, core.Pull)
            return [core.Answer(number, number + 1, Outcome.NOT_MEMBER) for number in call.wanted]
        if self._transfer.batch is None and self._trainer.reads_result:
            self._trainer.cluster.account.result_read(self._trainer, pserver)
        return [core.Answer(number, number + 1, Outcome.NONE, version) for number, version in rows[0]]

    def _heard(
        self, index: int, generation: int, answers: Sequence[core.Answer], error: FlightedlError | None = None
    ) -> None:
        """Continue as the core decides, until the program gives up."""
        trainer, now = self._trainer, self._trainer.world.now
        if self._is_given_up:
            return
        moved = None if error is None else core.or_moved(error, is_newest=trainer.knows_newest_placement)
        match trainer.steps.handle_answers(self._transfer.serial, index, generation, answers, moved):
            case core.Over():
                self._close(index)
            case core.Refused(final):
                self._error = self._error or final
                self._close(index)
            case core.AskAgain(reason, call):
                since = self._trouble_since.setdefault(index, now)
                if now - since >= trainer.give_up_s:
                    self._error = self._error or UnavailableError(f"gave up: {reason}")
                    self._close(index)
                else:
                    trainer.later(_RETRY_S, lambda: self._ask(index, call))
            case core.KeepWaiting(_, call):
                self._trouble_since.pop(index, None)
                trainer.later(_RETRY_S / 2, lambda: self._ask(index, call))

    def _close(self, index: int) -> None:
        """Close the calls to this pserver. After the last one, end the transfer."""
        if index not in self._open:
            return
        self._open.discard(index)
        if self._open:
            return
        if self._error is None:
            self._done()
        else:
            # The push may have reached only some of the blocks.
            self._trainer.cluster.account.out_of_step.add(self._transfer.member)
            self._failed(self._error)
