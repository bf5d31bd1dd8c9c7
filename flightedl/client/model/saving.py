"""Who writes the model, when the script of every trainer asks for it: one trainer for each request.

All trainers run the same script, so the n-th time that a trainer asks for a URL within an epoch is the same request as
the n-th time of any other. One key for each URL holds the newest request that was taken: on the lease of the trainer
that writes it, without a lease when it is written. Who asks for that one or an older one is told that it is taken; a
newer one may be taken when the one before it is written, or its writer has died. A request of a later life of the model
(``domain.recovery.lives``) is newer than all of a former life, and does not wait for them. A writer asks once more
right before the file appears: if it was frozen or cut off for longer than its lease, it writes only if nobody has taken
the request.

Not guaranteed: that a trainer which was started again within an epoch, and counts from the beginning, is not told of a
request that it never heard of.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from flightedl.client.connections import persistently
from flightedl.client.once import TrainerNames
from flightedl.errors import FencedError, FlightedlError
from flightedl.messages.base import decode, encode
from flightedl.messages.checkpoints import SaveRecord
from flightedl.ports import Absent, Delete, ModifiedAt, Put


class _TakenOverError(FencedError):
    """Another trainer writes it, because this one's lease had ended."""


@dataclass(slots=True)
class ModelSaves(TrainerNames):
    """The requests of one trainer to save the model."""

    _counts: Counter[tuple[str, int]] = field(init=False, default_factory=Counter)

    def save(self, url: str, epoch: int, write: Callable[[Callable[[], None]], None]) -> bool:
        """Take this trainer's next request and carry it out; False: it is another trainer's.

        Args:
            url: Where to.
            epoch: Of the request.
            write: Writes the file; calls what it is given right before the file appears, and lets its error through.
        """
        request = self.take(url, epoch)
        if request is None:
            return False

        def require() -> None:
            if not self._has(url, request):
                raise _TakenOverError(f"another trainer has taken over to write {url}")

        try:
            write(require)
        except _TakenOverError:
            return False
        except BaseException:
            with contextlib.suppress(FlightedlError):
                self.give_back(url, request)
            raise
        self.written(url, request)
        return True

    def take(self, url: str, epoch: int) -> SaveRecord | None:
        """Take this trainer's next request; None: another trainer has taken it."""
        trainer, number = self.registration.trainer, self._counts[url, epoch]
        request = SaveRecord(trainer=trainer, epoch=epoch, number=number, life=self.life())
        self._counts[url, epoch] += 1
        return request if self._has(url, request) else None

    def _has(self, url: str, request: SaveRecord) -> bool:
        """True if the request is this trainer's: taken now, or from before."""
        wait = self.waiting()
        while (taken := persistently(self.waiting(), lambda: self._try(url, request))) is None:
            wait.patiently(f"another trainer to finish writing {url}")
            wait.pause()
        wait.over()
        return taken

    def _try(self, url: str, request: SaveRecord) -> bool | None:
        """Whether this trainer has it; None: ask again."""
        key = self.keys.save(url)
        entry = self.coordinator.get(key)
        if entry is not None:
            known = decode(entry.value, SaveRecord)
            if known == request:
                return True
            if (known.life, known.epoch, known.number) >= (request.life, request.epoch, request.number):
                return False
            if not known.done and known.life == request.life:
                return None
        condition = Absent(key) if entry is None else ModifiedAt(key, entry.mod_revision)
        result = self.registration.under_lease(
            lambda held: self.coordinator.transact([condition], [Put(key, encode(request), held.lease_id)])
        )
        return True if result.committed else None

    def written(self, url: str, request: SaveRecord) -> None:
        """The request that was taken is done."""
        self._replace(url, request, msgspec.structs.replace(request, done=True))

    def give_back(self, url: str, request: SaveRecord) -> None:
        """It could not be done: somebody else may take it."""
        self._replace(url, request, None)

    def _replace(self, url: str, request: SaveRecord, by: SaveRecord | None) -> None:
        key = self.keys.save(url)

        def attempt() -> None:
            entry = self.coordinator.get(key)
            if entry is not None and decode(entry.value, SaveRecord) == request:
                operation = Delete(key) if by is None else Put(key, encode(by))
                self.coordinator.transact([ModifiedAt(key, entry.mod_revision)], [operation])

        persistently(self.waiting(), attempt)
