"""Driver of a simulated trainer's core, which carries out its effects and keeps its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

from flightedl.domain.consistency.modes import Async
from flightedl.domain.trainer.batches import BatchState
from flightedl.domain.trainer.feed import AssignedTask
from flightedl.domain.trainer.steps import Done, Effect, FindPlacement, Next, PrepareSum
from flightedl.domain.trainer.transfers import Transfer
from flightedl.errors import FlightedlError, UnavailableError
from tests.simulation.cores.job import Gradient, batch_of
from tests.simulation.cores.transfers import Travel
from tests.simulation.cores.world import Action, Violation

if TYPE_CHECKING:
    from tests.simulation.cores.trainer import Trainer

Failed = Callable[[Exception], None]
_FIND_S = 0.02


class Worker:
    """Runs one operation of the core at a time. A new operation replaces the one in progress."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        #: Identity of the current effect. Answers to earlier effects are ignored.
        self._awaited: object = None
        self._over: tuple[Action, Failed]
        self._travel: Travel | None = None
        #: Time at which the current operation began to look for the owners of blocks; None if it has not.
        self._finding_since: float | None = None
        #: Block -> its gradient in the current push.
        self._gradients: Mapping[int, Gradient] = {}
        #: Block -> current sum of weighted gradients; and the identity of that sum.
        self._sum: dict[int, dict[int, Fraction | int]] = {}
        self._sum_identity = -1
        #: Number of a pass over a task's data -> the task, and (block, element) -> the share of the element's batch in
        #: the first asynchronous mean with which it was pushed.
        self._shares: dict[int, tuple[AssignedTask, dict[tuple[int, int], Fraction | int]]] = {}
        #: Batches that have changed since the last ``take_changes``.
        self._changed: list[BatchState] = []

    @property
    def is_travelling(self) -> bool:
        """True while a transfer to pservers is in progress."""
        return self._travel is not None

    def run(
        self,
        step: Next,
        done: Action,
        failed: Failed | None = None,
        gradients: Mapping[int, Gradient] = MappingProxyType({}),
    ) -> None:
        """Begin an operation, and drop the one in progress.

        Args:
            step: The core's first step of the operation.
            done: Called when the operation has succeeded.
            failed: Called with the error of the operation; if None, the program ends with the error.
            gradients: Block -> gradient to push.
        """
        self._leave_travel()
        self._finding_since = None
        self._over = done, failed or (lambda error: self._trainer.end(f"{type(error).__name__}: {error}"))
        self._gradients = gradients
        self._go_on(step)

    def drop(self) -> None:
        """Drop the current operation, because no caller is waiting for it any longer."""
        self._awaited = None
        self._trainer.steps.drop()
        self._leave_travel()
        self._changed.clear()

    def abandon_batch(self) -> None:
        """Drop the batches of a loop that has been left."""
        self.end(self._trainer.steps.abandon_batch())
        self._changed.clear()

    def awaiting(self, then: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``then`` so that a later call does nothing if the worker has begun another operation by then."""
        awaited = self._awaited = object()

        def happened(*arguments: object) -> None:
            if awaited is self._awaited:
                self._awaited = None
                then(*arguments)

        return happened

    def fail(self, error: Exception) -> None:
        """Make the current operation fail with this error."""
        if self._awaited is not None:
            self._leave_travel()
            self._go_on(self._trainer.steps.failed(error))

    def take_changes(self) -> list[BatchState]:
        """Return the batches that have changed since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def end(self, done: Done) -> None:
        """Record that an operation has ended, successfully or not."""
        self._changed += done.batches
        if done.is_member_lost:
            self._trainer.membership.lost()

    def add(self, identity: int, gradients: Mapping[int, Gradient], weight: int) -> None:
        """Add a batch's gradients to a sum in the same way as ``GradientSums``."""
        if identity != self._sum_identity:
            self._sum_identity, self._sum = identity, {}
        for block, gradient in gradients.items() if weight else ():
            total = self._sum.setdefault(block, {})
            for element, amount in gradient.items():
                total[element] = total.get(element, 0) + weight * amount

    def _prepare_sum(self, prepared: PrepareSum) -> None:
        """Divide the sum by the core's divisors, and use the result as the gradient to push."""
        sums, self._sum = self._sum if prepared.identity == self._sum_identity else {}, {}
        self._gradients = {
            block: {
                element: Fraction(amount, prepared.divisors.get(str(block), 1)) for element, amount in total.items()
            }
            for block, total in sums.items()
        }
        self._require_shares(prepared)

    def _require_shares(self, prepared: PrepareSum) -> None:
        """Check the batches' shares in a sum. Record counts, or the first sum with a batch, determine its share."""
        steps, shape, batch = self._trainer.steps, self._trainer.cluster.shape, prepared.batch
        keeps_shares = isinstance(steps.mode, Async) and steps.mode.reduce == "mean"
        loop = self._trainer.loop
        assert loop is not None
        assert loop.steps.reading is not None, "a sum is pushed by the loop that reads its task"
        task = loop.steps.reading.task
        _, known = self._shares.setdefault(id(task), (task, {}))
        batches = [batch_of(each) for each in (batch.identity, *batch.others)]
        for block in map(self._trainer.key_of, steps.versions):
            shares = shape.shares(batches, block, steps.mode)
            if keeps_shares:
                right = {element: known.setdefault((block, element), share) for element, share in shares.items()}
            else:
                # A round weights batches by their records in the current push, so earlier shares no longer apply.
                right = dict(shares)
                for element in shares:
                    known.pop((block, element), None)
            if right != self._gradients.get(block, {}):
                raise Violation(
                    f"{self._trainer} pushes {self._gradients.get(block)} of {batches} to block {block}, not {right}"
                )

    def _find_placement(self, error: FlightedlError) -> None:
        """Use the newest known placement. A block may also be about to move, or on its way to its new owner."""
        trainer, now = self._trainer, self._trainer.world.now
        self._finding_since = now if self._finding_since is None else self._finding_since

        def look() -> None:
            trainer.place()
            self._go_on(trainer.steps.answered())

        if now - self._finding_since >= trainer.give_up_s:
            trainer.cluster.account.out_of_step.add(trainer.membership.member)
            self._go_on(trainer.steps.failed(UnavailableError(f"gave up: {error}")))
        else:
            trainer.later(_FIND_S, self.awaiting(look))

    def _leave_travel(self) -> None:
        travel, self._travel = self._travel, None
        if travel is not None:
            travel.give_up()

    def _go_on(self, step: Next) -> None:
        self._travel = self._awaited = None
        if not isinstance(step, Done):
            self._carry_out(step)
            return
        self.end(step)
        done, failed = self._over
        if step.error is None:
            done()
        elif isinstance(step.error, FlightedlError):
            failed(step.error)
        else:
            raise step.error

    def _carry_out(self, effect: Effect) -> None:
        steps = self._trainer.steps
        if isinstance(effect, FindPlacement):
            self._find_placement(effect.error)
            return
        send = self.awaiting(lambda: self._go_on(steps.answered()))
        awaited = self._awaited

        def throw(error: BaseException) -> None:
            if awaited is self._awaited:
                self._go_on(steps.failed(error))

        match effect:
            case Transfer():
                self._travel = Travel(self._trainer, effect, self._gradients, send, throw)
                self._travel.begin()
            case PrepareSum():
                self._prepare_sum(effect)
                send()
