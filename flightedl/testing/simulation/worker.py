"""Carries out what the core of a simulated trainer asks for, and keeps its gradients: which blocks have one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from flightedl.domain.trainer.steps import AskToJoin, Effect, TakeSum, WaitToJoin, Work
from flightedl.domain.trainer.transfers import Transfer
from flightedl.errors import FlightedlError
from flightedl.testing.simulation.transfers import Travel

if TYPE_CHECKING:
    from flightedl.testing.simulation.trainer import Trainer

_JOIN_AGAIN_S = 0.1
Failed = Callable[[Exception], None]


class Worker:
    """One piece of work at a time; the next one begins when that is over, or instead of it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._work: Work[Any] | None = None
        self._over: tuple[Callable[[Any], None], Failed]
        self._travel: Travel | None = None
        #: Blocks that have a gradient in the push that is under way.
        self._gradients: Collection[int] = ()
        #: Block -> in how many batches of the present sum it has one; the sum's identity.
        self._sum: dict[int, int] = {}
        self._sum_identity: object = None

    @property
    def is_travelling(self) -> bool:
        """Whether pservers are being asked."""
        return self._travel is not None

    def run(
        self,
        work: Work[Any],
        done: Callable[[Any], None],
        failed: Failed | None = None,
        gradients: Collection[int] = (),
    ) -> None:
        """Begin; what was under way before is dropped.

        Args:
            work: Of the core.
            done: Given its result.
            failed: Given the error that it ended with; None: the program ends with that.
            gradients: Of which blocks there is one.
        """
        self.drop()
        self._work = work
        self._over = done, failed or (lambda error: self._trainer.end(f"{type(error).__name__}: {error}"))
        self._gradients = gradients
        self._go_on(work, lambda: work.send(None))

    def drop(self) -> None:
        """Whatever comes of the present work, nobody waits for it."""
        work, self._work = self._work, None
        if work is not None:
            work.close()
        self._leave_travel()

    def fail(self, error: Exception) -> None:
        """The present work ends with this error."""
        work = self._work
        if work is not None:
            self._leave_travel()
            self._go_on(work, lambda: work.throw(error))

    def add(self, identity: object, blocks: Collection[int]) -> None:
        """Add a batch's gradients of these blocks to a sum, as ``GradientSums`` does."""
        if identity is not self._sum_identity:
            self._sum_identity, self._sum = identity, {}
        for block in blocks:
            self._sum[block] = self._sum.get(block, 0) + 1

    def _take(self, taken: TakeSum) -> None:
        """A sum is sent as a gradient where it has all of its batches."""
        has = self._sum if taken.identity is self._sum_identity else {}
        self._gradients = [block for block, count in has.items() if count == 1 + len(taken.together.further)]
        self._sum = {}

    def _leave_travel(self) -> None:
        travel, self._travel = self._travel, None
        if travel is not None:
            travel.give_up()

    def _go_on(self, work: Work[Any], resume: Callable[[], Effect]) -> None:
        if work is not self._work:
            return
        self._travel = None
        done, failed = self._over
        try:
            effect = resume()
        except StopIteration as end:
            self._work = None
            done(end.value)
        except FlightedlError as error:
            self._work = None
            failed(error)
        else:
            self._carry_out(work, effect)

    def _carry_out(self, work: Work[Any], effect: Effect) -> None:
        def send(answer: Any = None) -> None:
            self._go_on(work, lambda: work.send(answer))

        def throw(error: Exception) -> None:
            self._go_on(work, lambda: work.throw(error))

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
