"""One push, pull, or both, of a simulated trainer to all pservers: what is left of it, and what they answered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from flightedl.domain.exactly_once.batches import Batch
from flightedl.domain.pserver.block_values import ANSWERED
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.messages.parameters import Outcome
from flightedl.testing.simulation.job import blocks_of
from flightedl.testing.simulation.pserver import PullRequest, Push

if TYPE_CHECKING:
    from flightedl.testing.simulation.trainer import Trainer

_RETRY_S = 0.1
_ABSENT_S = 0.3


class Transfer:
    """Begins at once; ``then`` is called when every pserver has answered for all of its blocks, or for none.

    Args:
        trainer: Whose it is.
        current: What is pushed; None: values are pulled only.
        pulls: Block -> the least version wanted.
        member: Under which membership.
        pull_after_push: Values that follow the push.
        then: Given what blocks lack of a sum that they did not take.
    """

    def __init__(
        self,
        trainer: Trainer,
        current: CurrentBatch | None,
        pulls: Mapping[int, int],
        member: int,
        pull_after_push: bool,
        then: Callable[[Collection[tuple[int, ...]]], None],
    ) -> None:
        self._trainer = trainer
        self._current = current
        self._member = member
        self._pull_after_push = pull_after_push
        self._then = then
        self._refusals: set[tuple[int, ...]] = set()
        self._must_repeat = False
        self.is_given_up = False
        cluster = trainer.cluster
        count, cut_for = cluster.pserver_count, cluster.shape.cut_for
        self._blocks = {index: blocks_of(count, cut_for, index) for index in range(count)}
        self._pushes = {index: set(blocks if current else ()) for index, blocks in self._blocks.items()}
        self._pulls = {index: {n: pulls[n] for n in blocks if n in pulls} for index, blocks in self._blocks.items()}
        self._open = set(self._blocks)
        for index in self._blocks:
            self._go_on(index)

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return self.is_given_up or not self._open

    def give_up(self) -> None:
        """Whatever is answered from now on is of no interest."""
        self.is_given_up = True

    def _later(self, index: int, delay_s: float) -> None:
        self._trainer.later(delay_s, lambda: self._go_on(index))

    def _go_on(self, index: int) -> None:
        trainer = self._trainer
        if self.is_over or index not in self._open or not trainer.is_of_this_model():
            return
        if not self._pushes[index] and not self._pulls[index]:
            self._close(index)
            return
        key = trainer.directory.get(f"ps/{index}")
        if key is None:
            self._later(index, _ABSENT_S)
        elif self._pushes[index]:
            self._push(index, key)
        else:
            self._pull(index, key)

    def _close(self, index: int) -> None:
        self._open.discard(index)
        if not self._open:
            if self._must_repeat:
                self._trainer.membership.lost()
                if self._current is not None:
                    self._current.must_repeat = True
            self._then(self._refusals)

    def _too_late(self, index: int) -> None:
        self._must_repeat = True
        self._close(index)

    def _push(self, index: int, key: Any) -> None:
        trainer, current = self._trainer, self._current
        assert current is not None
        identities = (current.identity, *current.further)
        push = Push(
            trainer.name,
            trainer.generation,
            self._member,
            key.created,
            tuple(Batch(each.epoch, each.task, each.batch) for each in identities),
            current.assignment.batch_count,
            tuple((number, trainer.versions[number], 1.0) for number in sorted(self._pushes[index])),
            current.step,
        )

        def answered(reply: Any) -> None:
            if self.is_over:
                return
            if reply[0] != "pushed":
                self._later(index, 2 * _RETRY_S)
                return
            for number, outcome, lacking in reply[1]:
                if outcome not in {*ANSWERED, Outcome.PARTLY_APPLIED}:
                    self._too_late(index)
                    return
                self._pushes[index].discard(number)
                if outcome is Outcome.PARTLY_APPLIED:
                    self._refusals.add(tuple(lacking))
                    current.note_answers({}, index, key.created)
                    continue
                version = trainer.versions[number]
                current.note_answers({number: version}, index, key.created)
                if self._pull_after_push:
                    self._pulls[index][number] = trainer.mode.version_after(version)
            self._go_on(index)

        trainer.world.call(trainer, key.value, key.value.push, push, answered, lambda: self._later(index, _RETRY_S))

    def _pull(self, index: int, key: Any) -> None:
        trainer = self._trainer
        request = PullRequest(self._member, key.created, tuple(sorted(self._pulls[index].items())))

        def answered(reply: Any) -> None:
            if self.is_over:
                return
            if reply[0] == "not member":
                self._too_late(index)
            elif reply[0] == "pulled":
                for number, version in reply[1]:
                    trainer.versions[number] = version
                    self._pulls[index].pop(number, None)
                self._later(index, _RETRY_S / 2) if self._pulls[index] else self._close(index)
            else:
                self._later(index, _ABSENT_S)

        trainer.world.call(trainer, key.value, key.value.pull, request, answered, lambda: self._later(index, _RETRY_S))
