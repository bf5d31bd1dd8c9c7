"""Loop body of a simulated program: the calls for one batch, and the reactions to errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from flightedl.domain.trainer.batches import Batch
from flightedl.domain.trainer.steps import Next
from tests.simulation.cores.job import Gradient, batch_of
from tests.simulation.cores.world import Action

if TYPE_CHECKING:
    from tests.simulation.cores.trainer import Trainer

#: Fraction of errors that a program ignores.
_SWALLOWED_SHARE = 0.7
#: Maximum time to compute a slow batch, and fraction of batches that are slow.
_SLOWEST_S = 2.0
_SLOW_SHARE = 0.06


class Body:
    """One pass through the loop body, for one batch.

    Most passes make a single step. Some passes push in two parts, or pull before or after the push. Every block gets
    its gradient from the batch, unless a push fails.

    Args:
        trainer: The process that runs the program.
        batch: The batch.
        then: Called when the core has closed this batch and the program requests the next one.
    """

    def __init__(self, trainer: Trainer, batch: Batch, then: Action) -> None:
        self.batch = batch
        self._trainer = trainer
        self._then = then
        self._swallows_next = False
        self._calls = self._drawn()
        is_slow = trainer.own.random() < _SLOW_SHARE and trainer.world.are_faults_on
        longest_s = _SLOWEST_S if is_slow else trainer.cluster.scenario.batch_s
        trainer.later(longest_s * trainer.own.random(), self._go_on)

    def fail(self, error: Exception) -> None:
        """Make the current call of the program fail with an error that the program ignores."""
        if self._trainer.worker.is_travelling:
            self._swallows_next = True
            self._trainer.worker.fail(error)
            self._swallows_next = False

    def _go_on(self) -> None:
        trainer = self._trainer
        if self is not trainer.body:
            return
        if self._calls:
            self._calls.pop(0)()
        else:
            trainer.body = None
            trainer.cluster.progressed.add(trainer.name)
            trainer.worker.run(trainer.steps.close_batch(), self._then)

    def _failed(self, error: Exception) -> None:
        if self._swallows_next or self._trainer.own.random() < _SWALLOWED_SHARE:
            self._go_on()
        else:
            self._trainer.end(f"its program ended with {type(error).__name__}: {error}")

    def _drawn(self) -> list[Action]:
        random, blocks = self._trainer.own, sorted(self._trainer.steps.versions)
        kind = random.random()
        if (first_bucket := self._trainer.cluster.shape.first_bucket) is not None:
            # The rows of all tables are pushed together, at the end of a batch.
            blocks.sort(key=lambda number: number >= first_bucket)
            kind = min(kind, 0.9)
        if kind > 0.9:
            return [lambda: self._push(blocks, is_complete=False), self._pull]
        calls: list[Action] = [self._pull] if kind < 0.1 else []
        dense = [number for number in blocks if first_bucket is None or number < first_bucket]
        count = random.randrange(len(dense)) if kind > 0.8 and dense else 0
        if count:
            calls.append(lambda: self._push(blocks[:count], is_complete=False))
        calls.append(lambda: self._push(blocks[count:], is_complete=True))
        return calls

    def _pull(self) -> None:
        self._trainer.place()
        steps = self._trainer.steps
        self._run(steps.pull(list(steps.versions)))

    def _push(self, blocks: Sequence[int], *, is_complete: bool) -> None:
        """Push gradients in the same way as ``Parameters.push`` and ``step``."""
        self._trainer.place()
        steps = self._trainer.steps
        if steps.current is None or steps.current.must_repeat:
            self._go_on()
            return
        shape, batch = self._trainer.cluster.shape, batch_of(steps.current.pushed.identity)
        named = [number for number in self._trainer.now(blocks) if shape.has_gradient(batch, number)]
        gradients = {self._trainer.key_of(number): {shape.element_of(batch): 1} for number in named}
        if steps.sums is not None:
            added = steps.add([str(number) for number in gradients])
            steps.sums.check()
            self._trainer.worker.add(added.identity, gradients, added.weight)
            self._run(steps.step()) if is_complete else self._go_on()
        else:
            self._run(steps.step() if is_complete else steps.push(named), gradients)

    def _run(self, step: Next, gradients: Mapping[int, Gradient] = MappingProxyType({})) -> None:
        self._trainer.worker.run(step, self._go_on, self._failed, gradients)
