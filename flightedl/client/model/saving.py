"""Choose the one trainer that writes the model when every trainer's script requests it.

All trainers run the same script, so two trainers' n-th requests for the same URL within an epoch are the same request.
For each URL, one key in etcd holds the newest request that a trainer has claimed. The key is attached to the lease of
the writing trainer until the file is written, and then detached. A trainer that makes the same request, or an older
one, learns that it has been claimed.

A newer request can be claimed once the previous file is written or its writer has died. A request in a later life of
the model (``domain.recovery.lives``) is newer than all requests in earlier lives, and does not wait for them. Just
before the file appears, the writer checks the key again. If the writer was frozen or disconnected for longer than its
lease, it writes the file only if no other trainer has claimed the request.

Limitation: a trainer that was restarted within an epoch counts its requests from 1 again, so its first request may
wrongly count as claimed.
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
    """Raised by a writer whose lease ended: another trainer writes the file."""


@dataclass(slots=True)
class ModelSaves(TrainerNames):
    """One trainer's requests to save the model."""

    _counts: Counter[tuple[str, int]] = field(init=False, default_factory=Counter)

    def save(self, url: str, epoch: int, write: Callable[[Callable[[], None]], None]) -> bool:
        """Claim this trainer's next request and carry it out. Return False if another trainer has claimed it.

        Args:
            url: URL of the file.
            epoch: Epoch of the request.
            write: Writes the file. It must call its argument just before the file appears, and not catch its errors.
        """
        request = self.claim(url, epoch)
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
                self.release(url, request)
            raise
        self.mark_written(url, request)
        return True

    def claim(self, url: str, epoch: int) -> SaveRecord | None:
        """Claim this trainer's next request. Return None if another trainer has claimed it."""
        trainer, number = self.registration.trainer, self._counts[url, epoch]
        request = SaveRecord(trainer=trainer, epoch=epoch, number=number, life=self.life())
        self._counts[url, epoch] += 1
        return request if self._has(url, request) else None

    def _has(self, url: str, request: SaveRecord) -> bool:
        """True if this trainer has claimed the request, either now or earlier."""
        wait = self.waiting()
        while (is_claimed := persistently(self.waiting(), lambda: self._try_claim(url, request))) is None:
            wait.patiently(f"another trainer to finish writing {url}")
            wait.pause()
        wait.over()
        return is_claimed

    def _try_claim(self, url: str, request: SaveRecord) -> bool | None:
        """Try to claim the request. Return True if this trainer holds it, None if the outcome is unknown (retry)."""
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
            lambda held: self.coordinator.transact([condition], [held.attached(key, encode(request))])
        )
        return True if result.committed else None

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
