"""Carries out a ``Transfer`` of a simulated trainer: messages to the pservers, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flightedl.domain.exactly_once.accumulation import having_bits
from flightedl.domain.trainer import transfers as core
from flightedl.domain.trainer.joined import Answered, JoinedAnswers
from flightedl.errors import DeadlineError, FlightedlError, NotReadyError, ReplacedError, UnavailableError
from flightedl.messages.parameters import Outcome
from flightedl.messages.tasks import TasksReply
from flightedl.testing.simulation.job import Gradient, batch_of
from flightedl.testing.simulation.pserver import PullRequest, Push
from flightedl.testing.simulation.world import Action

if TYPE_CHECKING:
    from flightedl.testing.simulation.trainer import Trainer

_RETRY_S = 0.1
_REFUSALS: dict[str, FlightedlError] = {
    "fenced": ReplacedError("another process has this index"),
    "not ready": NotReadyError("the pserver has no values yet"),
}


class Travel:
    """A transfer on its way, to all pservers at once.

    Args:
        trainer: Whose it is.
        transfer: What is sent and asked for.
        gradients: Of the blocks that have one; the others that are pushed get the batch's arrival.
        done: Called when it is over.
        failed: Called instead, when it is over and has failed.
    """

    def __init__(
        self,
        trainer: Trainer,
        transfer: core.Transfer,
        gradients: Mapping[int, Gradient],
        done: Action,
        failed: Callable[[FlightedlError], None],
    ) -> None:
        self._trainer = trainer
        self._transfer = transfer
        self._gradients = gradients
        self._done = done
        self._failed = failed
        self._open = {shard.index for shard in transfer.shards}
        self._error: FlightedlError | None = None
        #: Pserver -> since when it has not answered.
        self._trouble_since: dict[int, float] = {}

    def begin(self) -> None:
        """Ask all pservers."""
        for shard in self._transfer.shards:
            self._ask(shard)

    def give_up(self) -> None:
        """Whatever is answered from now on is of no interest."""
        self._transfer.give_up()

    def _ask(self, shard: core.ShardTransfer) -> None:
        """Ask the process that holds the index now, once."""
        trainer = self._trainer
        if shard.is_over:
            self._close(shard)
            return
        try:
            trainer.require_same_model()
            key = trainer.directory.get(f"ps/{shard.index}")
            if key is None:
                raise NotReadyError(f"nobody holds index {shard.index}")
        except FlightedlError as error:
            self._judge(shard, shard.failed(error))
            return
        if self._transfer.current is None and not trainer.job_end.may_read(shard.index, key.created):
            self._look_at_end(shard, key)
        else:
            self._call(shard, key)

    def _look_at_end(self, shard: core.ShardTransfer, key: Any) -> None:
        """Ask the master whether this process has everything, and only then this process."""

        def heard(reply: TasksReply | Exception) -> None:
            try:
                if isinstance(reply, Exception):
                    raise reply
                self._trainer.job_end.require(reply, shard.index, key.created)
            except FlightedlError as error:
                self._judge(shard, shard.failed(error))
            else:
                self._call(shard, key)

        self._trainer.ask_for_end(heard)

    def _call(self, shard: core.ShardTransfer, key: Any) -> None:
        trainer = self._trainer

        def late() -> None:
            self._judge(shard, shard.failed(DeadlineError(f"{key.value.name} did not answer")))

        def answered(reply: Any) -> None:
            if shard.is_over:
                return
            if (refusal := _REFUSALS.get(reply[0])) is not None:
                self._judge(shard, shard.failed(refusal))
                return
            self._take(shard, key.value, call, reply)
            self._judge(shard, shard.ended())

        match call := shard.next_call(key.created):
            case core.Push():
                trainer.world.call(trainer, key.value, key.value.push, self._push(shard, call, key), answered, late)
            case core.Pull(wanted):
                pairs = [(each, wanted[number]) for number in wanted for each in self._meant(shard, number)]
                request = PullRequest(self._transfer.member, key.created, tuple(sorted(pairs)))
                trainer.world.call(trainer, key.value, key.value.pull, request, answered, late)

    def _buckets(self, shard: core.ShardTransfer) -> range:
        return self._trainer.buckets[shard.index]

    def _meant(self, shard: core.ShardTransfer, number: int) -> range:
        """The blocks of a pserver that the core means by one."""
        buckets = self._buckets(shard)
        return buckets if number in buckets else range(number, number + 1)

    def _push(self, shard: core.ShardTransfer, call: core.Push, key: Any) -> Push:
        current = call.current
        return Push(
            self._trainer.name,
            self._trainer.generation,
            self._transfer.member,
            key.created,
            tuple(map(batch_of, (current.identity, *current.further))),
            current.assignment.batch_count,
            tuple(
                (each, call.bases[number], self._gradients.get(number, {}))
                for number in call.blocks
                for each in self._meant(shard, number)
            ),
            float(current.record_count),
            current.step,
        )

    def _take(self, shard: core.ShardTransfer, pserver: Any, call: core.Call, reply: Any) -> None:
        """Say what was answered."""
        kind, *rows = reply
        buckets = self._buckets(shard)
        joined = JoinedAnswers(buckets, shard)
        if kind == "pushed":
            for number, outcome, lacking in rows[0]:
                assert isinstance(call, core.Push)
                having = [place not in lacking for place in range(1 + len(call.current.further))]
                to: Answered = joined if number in buckets else shard
                to.answered(range(number, number + 1), outcome, having=having_bits(having))
        elif kind == "not member":
            assert isinstance(call, core.Pull)
            for number in call.wanted:
                shard.answered(range(number, number + 1), Outcome.NOT_MEMBER)
        else:
            if self._transfer.current is None and self._trainer.reads_result:
                self._trainer.cluster.account.result_read(self._trainer, pserver)
            for number, version in rows[0]:
                to = joined if number in buckets else shard
                to.answered(range(number, number + 1), Outcome.NONE, version)

    def _judge(self, shard: core.ShardTransfer, verdict: core.Verdict) -> None:
        """Go on as the core says, for as long as the program has patience."""
        trainer, now = self._trainer, self._trainer.world.now
        match verdict:
            case core.Over():
                self._close(shard)
            case core.Refused(error):
                self._error = self._error or error
                self._close(shard)
            case core.AskAgain(error):
                since = self._trouble_since.setdefault(shard.index, now)
                if now - since >= trainer.give_up_s:
                    self._error = self._error or UnavailableError(f"gave up: {error}")
                    self._close(shard)
                else:
                    trainer.later(_RETRY_S, lambda: self._ask(shard))
            case core.KeepWaiting():
                self._trouble_since.pop(shard.index, None)
                trainer.later(_RETRY_S / 2, lambda: self._ask(shard))

    def _close(self, shard: core.ShardTransfer) -> None:
        """Nothing more is asked of this pserver."""
        if self._transfer.is_given_up or shard.index not in self._open:
            return
        self._open.discard(shard.index)
        if self._open:
            return
        if self._error is None:
            self._done()
        else:
            # What it pushes may have come to some blocks and not to others.
            self._trainer.cluster.account.out_of_step.add(self._transfer.member)
            self._failed(self._error)
