"""Driver of a simulated trainer's part in the election of initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flightedl.domain.trainer.first_values import (
    Candidate,
    Confirm,
    CreateKey,
    Elected,
    ElectionOfFirstValues,
    Pause,
    ReadKey,
    Upload,
    WaitFor,
)
from flightedl.errors import DeadlineError, NotReadyError
from flightedl.recording.recorded import recorded
from tests.simulation.cores.etcd import DONE, INIT, Transaction
from tests.simulation.cores.world import Reply

if TYPE_CHECKING:
    from tests.simulation.cores.trainer import Trainer

_PAUSE_S = 0.3


class FirstValues:
    """One trainer's part in the election of initial values for a declared model.

    Args:
        trainer: The candidate.
        elected: Called when the model has first values.
    """

    def __init__(self, trainer: Trainer, elected: Callable[[Elected], None]) -> None:
        self._trainer = trainer
        self._elected = elected
        self._core = recorded(trainer.recorder, {}, ElectionOfFirstValues, trainer.name, trainer.plan.pserver_count)

    def go_on(self) -> None:
        """Take the next step."""
        trainer = self._trainer
        if not trainer.lease.is_held():
            trainer.end("its lease was lost before it had a model")
            return
        known = trainer.directory.get(INIT)
        etcd = trainer.cluster.etcd
        match self._core.next_step(0 if known is None else known.created):
            case Elected() as elected:
                self._elected(elected)
            case Pause() | WaitFor():
                trainer.later(_PAUSE_S, self.go_on)
            case ReadKey():
                self._call(etcd, etcd.read, [INIT], self._key_read)
            case CreateKey():
                transaction = Transaction(created={INIT: 0}, puts={INIT: trainer}, lease=trainer.lease)
                self._call(etcd, etcd.transact, transaction, lambda _: self._core.creation_attempted())
            case Upload(index, election):
                self._upload(index, election)
            case Confirm(election, generations):
                named = {f"ps/{index}": generation for index, generation in enumerate(generations)}
                done = Transaction(created={INIT: election, **named}, puts={INIT: DONE})
                self._call(etcd, etcd.transact, done, self._confirmed)

    def _key_read(self, found: Any) -> None:
        key = found[INIT]
        if key is None:
            self._core.key_read(None)
            return
        name = "" if key.value == DONE else key.value.name
        self._core.key_read(Candidate(name, key.value == DONE, key.created, key.modified))

    def _confirmed(self, reply: Any) -> None:
        is_committed, revision, _ = reply
        self._core.confirmed(revision if is_committed else None)

    def _upload(self, index: int, election: int) -> None:
        key = self._trainer.directory.get(f"ps/{index}")
        if key is None:
            self._core.failed(NotReadyError(f"nobody holds index {index}"))
            self.go_on()
            return

        def given(reply: Any) -> None:
            _, initialized, count = reply
            self._core.uploaded(key.created, initialized, count)

        self._call(key.value, key.value.initialize, (key.created, election), given)

    def _call(self, server: Any, handler: Any, argument: Any, answered: Reply) -> None:
        """Make a call, report its outcome to the core, and carry out the next step."""

        def done(reply: Any) -> None:
            answered(reply)
            self.go_on()

        def late() -> None:
            self._core.failed(DeadlineError("no answer"))
            self.go_on()

        self._trainer.world.call(self._trainer, server, handler, argument, done, late)
