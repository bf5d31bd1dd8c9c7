"""Choose the one trainer that writes the model when every trainer's script requests it.

All trainers run the same script, so two trainers' n-th requests for the same URL within an epoch are the same request.
For each URL, one key in etcd holds the newest request that a trainer has claimed. The key is attached to the lease of
the writing trainer until the file is written, and then detached. A trainer that makes the same request, or an older
one, learns that it has been claimed.

A trainer that starts later, for example because it replaces another one, adopts the stored number: its first request is
the one that follows the request that was stored when it started. It is the stored request if another trainer has made
that since. A trainer whose requests are older than that of a trainer that has left adopts the number, too. After the
last epoch, all trainers count their requests from 1, because the values no longer change.

A newer request can be claimed once the previous file is written or its writer has died. A request in a later life of
the model (``domain.recovery.lives``) is newer than all requests in earlier lives, and does not wait for them. Just
before the file appears, the writer checks the key again. If the writer was frozen or disconnected for longer than its
lease, it writes the file only if no other trainer has claimed the request.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from flightedl.client.connections import persistently
from flightedl.client.once import TrainerNames
from flightedl.domain.trainer.membership import AFTER_ALL
from flightedl.errors import FencedError, FlightedlError
from flightedl.messages.base import decode, encode
from flightedl.messages.checkpoints import SaveRecord
from flightedl.ports import Absent, Delete, ModifiedAt, Put


class _TakenOverError(FencedError):
    """Raised by a writer whose lease ended: another trainer writes the file."""


class Saved(enum.StrEnum):
    """Result of a request to write a file that one of all trainers writes. It is true only if this trainer wrote it."""

    #: This trainer wrote the file, or had the master write it.
    WRITTEN = "written"
    #: Another trainer made the same request, and wrote or is writing the file.
    BY_ANOTHER = "another wrote it"
    #: A newer request has already been made.
    NOT_NEEDED = "not needed"

    def __bool__(self) -> bool:
        return self is Saved.WRITTEN


@dataclass(slots=True)
class ModelSaves(TrainerNames):
    """One trainer's requests to save the model."""

    #: (URL, epoch) -> number of this trainer's next request.
    _next: dict[tuple[str, int], int] = field(init=False, default_factory=dict)
    #: Generation of this trainer when it started.
    _started: int = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.registration.generation

    def save(self, url: str, epoch: int, write: Callable[[Callable[[], None]], None]) -> Saved:
        """Claim this trainer's next request and carry it out, unless that request or a newer one is claimed already.

        Args:
            url: URL of the file.
            epoch: Epoch of the request.
            write: Writes the file. It must call its argument just before the file appears, and not catch its errors.
        """
        request = self.claim(url, epoch)
        if isinstance(request, Saved):
            return request

        def require() -> None:
            if not self._claimed(url, request):
                raise _TakenOverError(f"another trainer has taken over to write {url}")

        try:
            write(require)
        except _TakenOverError:
            return Saved.BY_ANOTHER
        except BaseException:
            with contextlib.suppress(FlightedlError):
                self.release(url, request)
            raise
        self.mark_written(url, request)
        return Saved.WRITTEN

    def claim(self, url: str, epoch: int) -> SaveRecord | Saved:
        """Claim this trainer's next request. Return the reason if that request, or a newer one, is already claimed."""
        number = persistently(self.waiting(), lambda: self._next_number(url, epoch))
        request = SaveRecord(trainer=self.registration.trainer, epoch=epoch, number=number, life=self.life())
        self._next[url, epoch] = number + 1
        result = self._claimed(url, request)
        return request if result else result

    def _next_number(self, url: str, epoch: int) -> int:
        own, entry = self._next.get((url, epoch)), self.coordinator.get(self.keys.save(url))
        if entry is None or epoch >= AFTER_ALL:
            return own or 0
        known = decode(entry.value, SaveRecord)
        if (known.life, known.epoch) != (self.life(), epoch):
            return own or 0
        if own is None:
            return known.number + (entry.mod_revision < self._started)
        has_left = known.number > own and self.coordinator.get(self.keys.trainer(known.trainer)) is None
        return known.number + 1 if has_left else own

    def _claimed(self, url: str, request: SaveRecord) -> Saved:
        """Return ``WRITTEN`` if this trainer holds the request, and therefore writes the file."""
        wait = self.waiting()
        while (result := persistently(self.waiting(), lambda: self._try_claim(url, request))) is None:
            wait.patiently(f"another trainer to finish writing {url}")
            wait.pause()
        wait.over()
        return result

    def _try_claim(self, url: str, request: SaveRecord) -> Saved | None:
        """Try to claim the request. Return None if the outcome is unknown (retry)."""
        key = self.keys.save(url)
        entry = self.coordinator.get(key)
        if entry is not None:
            known = decode(entry.value, SaveRecord)
            if known == request:
                return Saved.WRITTEN
            newest, own = (known.life, known.epoch, known.number), (request.life, request.epoch, request.number)
            if newest >= own:
                return Saved.BY_ANOTHER if newest == own else Saved.NOT_NEEDED
            if not known.done and known.life == request.life:
                return None
        condition = Absent(key) if entry is None else ModifiedAt(key, entry.mod_revision)
        result = self.registration.under_lease(
            lambda held: self.coordinator.transact([condition], [held.attached(key, encode(request))])
        )
        return Saved.WRITTEN if result.committed else None

    def mark_written(self, url: str, request: SaveRecord) -> None:
        self._replace(url, request, msgspec.structs.replace(request, done=True))

    def release(self, url: str, request: SaveRecord) -> None:
        """Release a claimed request whose execution failed, so that another trainer can claim it."""
        self._replace(url, request, None)

    def _replace(self, url: str, request: SaveRecord, by: SaveRecord | None) -> None:
        key = self.keys.save(url)

        def attempt() -> None:
            entry = self.coordinator.get(key)
            if entry is not None and decode(entry.value, SaveRecord) == request:
                operation = Delete(key) if by is None else Put(key, encode(by))
                self.coordinator.transact([ModifiedAt(key, entry.mod_revision)], [operation])

        persistently(self.waiting(), attempt)
