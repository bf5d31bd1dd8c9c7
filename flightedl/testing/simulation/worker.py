"""Carries out what the core of a simulated trainer asks for, and keeps its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flightedl.domain.consistency.modes import Async
from flightedl.domain.trainer.steps import AskToJoin, Done, Effect, Next, TakeSum, WaitToJoin
from flightedl.domain.trainer.transfers import Transfer
from flightedl.errors import FlightedlError
from flightedl.messages.tasks import Assignment
from flightedl.testing.simulation.job import Gradient, batch_of
from flightedl.testing.simulation.transfers import Travel
from flightedl.testing.simulation.world import Violation

if TYPE_CHECKING:
    from flightedl.testing.simulation.trainer import Trainer

_JOIN_AGAIN_S = 0.1
Failed = Callable[[Exception], None]


class Worker:
    """One operation of the core at a time; the next one begins when that is over, or instead of it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        #: Another object for each effect that is under way; answers to others count no more.
        self._awaited: object = None
        self._over: tuple[Callable[[bool], None], Failed]
        self._travel: Travel | None = None
        #: Block -> its gradient, of the push that is under way.
        self._gradients: Mapping[int, Gradient] = {}
        #: Block -> its gradients of the present sum, times their weights; the sum's identity.
        self._sum: dict[int, dict[int, Fraction | int]] = {}
        self._sum_identity: object = None
        #: id of an assignment -> itself, and (block, element) -> the share that a batch had in the first asynchronous
        #: mean it was pushed in.
        self._shares: dict[int, tuple[Assignment, dict[tuple[int, int], Fraction | int]]] = {}

    @property
    def is_travelling(self) -> bool:
        """Whether pservers are being asked."""
        return self._travel is not None

    def run(
        self,
        step: Next,
        done: Callable[[bool], None],
        failed: Failed | None = None,
        gradients: Mapping[int, Gradient] = MappingProxyType({}),
    ) -> None:
        """Begin; what was under way before is dropped.

        Args:
            step: Of the core: how the operation begins.
            done: Called with whether a batch is open.
            failed: Given the error that it ended with; None: the program ends with that.
            gradients: Block -> what is pushed to it.
        """
        self._leave_travel()
        self._over = done, failed or (lambda error: self._trainer.end(f"{type(error).__name__}: {error}"))
        self._gradients = gradients
        self._go_on(step)

    def drop(self) -> None:
        """Nobody waits for the present operation any more."""
        self._awaited = None
        self._trainer.steps.drop()
        self._leave_travel()

    def fail(self, error: Exception) -> None:
        """The present operation ends with this error."""
        if self._awaited is not None:
            self._leave_travel()
            self._go_on(self._trainer.steps.failed(error))

    def add(self, identity: object, gradients: Mapping[int, Gradient], weight: int) -> None:
        """Add a batch's gradients to a sum, as ``GradientSums`` does."""
        if identity is not self._sum_identity:
            self._sum_identity, self._sum = identity, {}
        for block, gradient in gradients.items() if weight else ():
            total = self._sum.setdefault(block, {})
            for element, amount in gradient.items():
                total[element] = total.get(element, 0) + weight * amount

    def _take(self, taken: TakeSum) -> None:
        """A sum is sent as a gradient, divided as the core says."""
        sums, self._sum = self._sum if taken.identity is self._sum_identity else {}, {}
        self._gradients = {
            block: {element: Fraction(amount, taken.divisors.get(str(block), 1)) for element, amount in total.items()}
            for block, total in sums.items()
        }
        self._require_shares(taken)

    def _require_shares(self, taken: TakeSum) -> None:
        """Each batch has its share in the sum, by its records, or the one that it had in the first sum with it."""
        steps, shape, together = self._trainer.steps, self._trainer.cluster.shape, taken.together
        keeps_shares = isinstance(steps.mode, Async) and steps.mode.reduce == "mean"
        _, known = self._shares.setdefault(id(together.assignment), (together.assignment, {}))
        batches = [batch_of(each) for each in (together.identity, *together.further)]
        for block in steps.versions:
            shares = shape.shares(batches, block, steps.mode)
            if keeps_shares:
                right = {element: known.setdefault((block, element), share) for element, share in shares.items()}
            else:
                # A round weighs what is pushed now, and so does whatever follows it.
                right = dict(shares)
                for element in shares:
                    known.pop((block, element), None)
            if right != self._gradients.get(block, {}):
                raise Violation(
                    f"{self._trainer} pushes {self._gradients.get(block)} of {batches} to block {block}, not {right}"
                )

    def _leave_travel(self) -> None:
        travel, self._travel = self._travel, None
        if travel is not None:
            travel.give_up()

    def _go_on(self, step: Next) -> None:
        self._travel = self._awaited = None
        if not isinstance(step, Done):
            self._carry_out(step)
            return
        done, failed = self._over
        if step.error is None:
            done(step.is_open)
        elif isinstance(step.error, FlightedlError):
            failed(step.error)
        else:
            raise step.error

    def _carry_out(self, effect: Effect) -> None:
        awaited = self._awaited = object()

        def send(answer: Any = None) -> None:
            if awaited is self._awaited:
                self._go_on(self._trainer.steps.answered(answer))

        def throw(error: Exception) -> None:
            if awaited is self._awaited:
                self._go_on(self._trainer.steps.failed(error))

        match effect:
            case Transfer():
                self._travel = Travel(self._trainer, effect, self._gradients, send, throw)
                self._travel.begin()
            case TakeSum():
                self._take(effect)
                send()
            case AskToJoin(current):
                self._trainer.ask_to_join(current, send)
            case WaitToJoin():
                self._trainer.later(_JOIN_AGAIN_S, send)
