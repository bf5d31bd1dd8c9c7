"""A simulated trainer's part in an evaluation: the product's feed, and sums over the batches.

Batch k of the evaluation's data has fewer than 8 records, and its metric, the mean over these records, is 16**k. So the
mean that trainers receive at the end shows how often each batch was included, and with which weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flightedl.domain.trainer.feed import Ask, AssignedTask
from flightedl.messages.tasks import TasksReply
from tests.simulation.cores.loop import Loop
from tests.simulation.cores.world import Action

if TYPE_CHECKING:
    from tests.simulation.cores.trainer import Trainer

_MEASURED_S = 0.8


class Evaluating(Loop):
    """Loop of one evaluation, from its declaration until its result is known.

    Args:
        trainer: The process that evaluates.
        name: Name of the evaluation.
        then: Called when the result is known.
    """

    def __init__(self, trainer: Trainer, name: str, then: Action) -> None:
        super().__init__(trainer, 0.0, name)
        self._then = then

    def begin(self) -> None:
        """Declare the evaluation, then request work."""
        self.trainer.declare_evaluation(self.evaluation, self._pump)

    def _handle_reply(self, ask: Ask, reply: TasksReply) -> None:
        super()._handle_reply(ask, reply)
        if reply.outcome == "epochs_done":
            self.trainer.cluster.account.evaluated(self.trainer, self.evaluation, reply)

    def _read(self) -> None:
        if self.feed.is_done and not self.is_left:
            self.close()
            self._then()
        elif not self._is_reading and not self.is_left and (task := self.feed.begin()) is not None:
            self._is_reading = True
            self._measure_from(task, task.assignment.first_batch, 0.0, 0.0)

    def _measure_from(self, task: AssignedTask, number: int, total: float, weight: float) -> None:
        def measured() -> None:
            if self.is_left or not self.feed.is_held(task):
                self._is_reading = False
                self._read()
                return
            worth, records = self.trainer.cluster.shape.measured(task.assignment.task, number)
            self._measure_from(task, number + 1, total + worth, weight + records)

        if number < task.assignment.end_batch:
            self.trainer.later(_MEASURED_S * self.trainer.own.random(), measured)
            return
        self._is_reading = False
        self.feed.finished(
            task, (), self.world.now, {"worth": (total, weight), "life": (weight * self.trainer.life, weight)}
        )
        self._pump()
