"""A key that this process holds by a lease. Holding the key entitles the process to act, for example as master.

Rules:

* The key's create_revision is its holder's *generation*. Every write under the key is a transaction that fails unless
  the key still has this create_revision. It is this check, not the lease, that makes a deposed holder harmless.
* ``domain.tenure`` decides when to renew the lease and when it counts as lost. It uses a clock that also advances while
  the process or the machine is frozen.
* A process that starts slowly requests a longer time to live at first, and the usual one when it is ready
  (``hold_for``): the key moves to another lease and keeps its create_revision. Otherwise, a starting process on a busy
  machine might not renew for seconds, and its restart would make the machine even busier.
* Other keys may be on the same lease (``attached``). They stay on it when the key moves, so it is then renewed as well.
* A process that has lost its key may claim it again, and then has a new generation.
* A separate thread renews the lease. It holds no lock while it waits for etcd.

While ``is_held`` is True, another process may nevertheless hold the key already. Only ``write`` can tell.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Sequence

from flightedl.domain.tenure import RENEWALS_PER_TTL, Tenure
from flightedl.errors import FencedError, FlightedlError, OutcomeUnknownError, UnavailableError
from flightedl.marks import sometimes
from flightedl.ports import (
    Absent,
    Clock,
    CompactedError,
    Condition,
    Coordinator,
    CreatedAt,
    Entry,
    Lease,
    LeaseLostError,
    ModifiedAt,
    Operation,
    Put,
    Removed,
    TransactionResult,
)

_log = logging.getLogger(__name__)

_WATCH_SLICE_S = 0.5
_UNREACHABLE_PAUSE_S = 0.2

OnLost = Callable[[str], None]


class HeldKey:
    """A key claimed by :meth:`claim` or :meth:`claim_when_free`. Thread-safe."""

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        key: str,
        generation: int,
        lease: Lease,
        sent_at: float,
        on_lost: OnLost | None,
    ) -> None:
        self.key = key
        self.generation = generation
        self._coordinator = coordinator
        self._clock = clock
        self._lease = lease
        #: True if other keys may be on the lease.
        self._has_attached = False
        #: Former leases that other keys may be on.
        self._former: list[Lease] = []
        #: Requested time to live; None if no change is requested.
        self._target_ttl_s: float | None = None
        #: Leases, by id, to which the key may have been moved.
        self._tried: dict[int, Lease] = {}
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._tenure = Tenure(key, lease.ttl_s, sent_at)
        self._is_released = False
        #: Set when the renewal thread has nothing more to renew.
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"flightedl-keeper {key}", daemon=True)

    @classmethod
    def claim(
        cls,
        coordinator: Coordinator,
        clock: Clock,
        key: str,
        value: bytes,
        ttl_s: float,
        on_lost: OnLost | None = None,
        also_when: Sequence[Condition] = (),
        also: Sequence[Operation] = (),
    ) -> HeldKey | None:
        """Create ``key`` under a new lease. Return None if another process holds it, or if ``also_when`` is not met.

        Args:
            coordinator: Access to etcd.
            clock: Clock that decides when the key counts as lost.
            key: The key.
            value: Value of the key.
            ttl_s: Requested time to live. The granted one, ``.ttl_s``, may be longer.
            on_lost: Called once by the renewal thread, with the reason, when the key is lost, but not after
                ``release``. Must not raise an error. None if the loss has no consequences.
            also_when: Further conditions.
            also: Further operations of the same transaction.

        Raises:
            UnavailableError: nothing was claimed. Retry.
        """
        sent_at = clock.now()
        lease = coordinator.grant(ttl_s)
        generation: int | None = None
        try:
            result = coordinator.transact([Absent(key), *also_when], [Put(key, value, lease.id), *also])
            generation = result.revision if result.committed else None
        except OutcomeUnknownError as error:
            generation = _claimed_after_all(coordinator, key, lease.id)
            if generation is None:
                raise UnavailableError(f"{key} could not be claimed: {error}") from None
        except LeaseLostError:
            raise UnavailableError(f"{key} could not be claimed: the lease ended before the claim was made") from None
        finally:
            # Revoking the lease also rejects a claim that is still in flight.
            if generation is None:
                with contextlib.suppress(FlightedlError):
                    lease.revoke()
        if generation is None:
            return None
        held = cls(coordinator, clock, key, generation, lease, sent_at, on_lost)
        held._thread.start()
        return held

    @classmethod
    def claim_when_free(
        cls,
        coordinator: Coordinator,
        clock: Clock,
        key: str,
        value: bytes,
        ttl_s: float,
        on_lost: OnLost | None = None,
        *,
        stop: threading.Event,
    ) -> HeldKey | None:
        """Wait until ``key`` is free, then claim it. Keep trying during outages of etcd. None if ``stop`` is set."""
        has_warned = False
        while not stop.is_set():
            try:
                _wait_until_free(coordinator, key, stop)
                if not stop.is_set() and (held := cls.claim(coordinator, clock, key, value, ttl_s, on_lost)):
                    return held
            except UnavailableError as error:
                if not has_warned:
                    _log.warning("waiting to claim a key: %s key=%s", error, key)
                has_warned = True
                stop.wait(_UNREACHABLE_PAUSE_S)
        return None

    @property
    def is_held(self) -> bool:
        """True if this process may still act under the key. Once it is False, it never becomes True again."""
        # Read without the lock, because pservers check this for every message, and only one field changes at a time.
        return self._tenure.left_s(self._clock.now()) > 0

    @property
    def lost_because(self) -> str:
        """Reason why the key was lost or released; empty while it is held."""
        now = self._clock.now()
        with self._lock:
            self._tenure.left_s(now)
            return self._tenure.lost_because

    @property
    def ttl_s(self) -> float:
        return self._tenure.ttl_s

    @property
    def lease_id(self) -> int:
        """Id of the key's lease at this moment. Use ``attached`` to write other keys on it."""
        return self._lease.id

    @property
    def slack_s(self) -> float:
        """Seconds for which this process may still act if no further renewal succeeds."""
        now = self._clock.now()
        with self._lock:
            return self._tenure.left_s(now)

    def attached(self, key: str, value: bytes) -> Put:
        """Return the operation that writes another key on this key's lease.

        The other key is deleted when this key is lost or released. ``hold_for`` does not change its time to live.
        """
        with self._lock:
            self._has_attached = True
            return Put(key, value, self._lease.id)

    def write(self, operations: Sequence[Operation], extra_conditions: Sequence[Condition] = ()) -> TransactionResult:
        """Execute a transaction on condition that this process still holds the key.

        Returns:
            The result. ``committed`` is False only if one of ``extra_conditions`` was not met.

        Raises:
            FencedError: the key was lost. Nothing was done.
            UnavailableError: nothing was done.
            OutcomeUnknownError: the transaction may have been executed.
        """
        if reason := self.lost_because:
            raise FencedError(f"{reason}: this process may not write any more")
        fence = CreatedAt(self.key, self.generation)
        result = self._coordinator.transact([fence, *extra_conditions], operations)
        if not result.committed:
            found = result.entries.get(self.key)
            if found is None or found.create_revision != self.generation:
                holder = "nobody holds it" if found is None else f"generation {found.create_revision} holds it"
                raise FencedError(self._lose(f"{self.key} is no longer held by generation {self.generation}: {holder}"))
        return result

    def require(self) -> None:
        """Wait until etcd confirms that this process holds the key. Retry until etcd answers or the key is lost.

        Raises:
            FencedError: the key was lost.
        """
        while True:
            try:
                self.write([])
            except (UnavailableError, OutcomeUnknownError):
                self._clock.sleep(_UNREACHABLE_PAUSE_S)
            else:
                return

    def has_lost(self) -> None:
        """Mark the key as lost, because a caller has noticed the lease's end before the next renewal did."""
        self._lose(f"the lease of {self.key} has ended")

    def seen(self, entry: Entry | None, revision: int) -> None:
        """Mark the key as lost if it was deleted. ``entry`` is the entry at this revision of etcd; None if absent."""
        if revision >= self.generation and (entry is None or entry.create_revision != self.generation):
            self._lose(f"{self.key} was deleted by another process")

    def hold_for(self, ttl_s: float) -> None:
        """Change the time to live at the next renewal. The key keeps its value."""
        self._target_ttl_s = ttl_s

    def release(self) -> None:
        """Stop renewing and end the lease, so that other processes notice immediately. May be called repeatedly."""
        self._is_released = True
        self._lose(f"{self.key} was released")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        # Ignore errors: if etcd is unreachable, the lease expires by itself.
        for lease in (self._lease, *self._former, *self._tried.values()):
            with contextlib.suppress(FlightedlError):
                lease.revoke()

    def _lose(self, reason: str) -> str:
        with self._lock:
            self._is_over.set()
            return self._tenure.lose(reason)

    def _keep(self) -> None:
        trouble = ""
        while not self._is_over.wait(self._pause_s(is_troubled=bool(trouble))) and self.is_held:
            sent_at = self._clock.now()
            try:
                self._lease.renew()
                self._note_renewed(sent_at)
                if self._target_ttl_s is not None:
                    self._move(self._target_ttl_s)
                self._renew_former()
            except LeaseLostError:
                self.has_lost()
            except FlightedlError as error:
                if not trouble:
                    # Without ``on_lost``, the loss of the key has no consequences.
                    level = logging.INFO if self._on_lost is None else logging.WARNING
                    _log.log(level, "a lease could not be renewed: %s key=%s", error, self.key)
                trouble = str(error)
            else:
                trouble = ""
        reason = self.lost_because
        if self._on_lost is not None and not self._is_released:
            self._on_lost(f"{reason} ({trouble})" if trouble else reason)

    def _note_renewed(self, sent_at: float) -> None:
        now = self._clock.now()
        with self._lock:
            self._tenure.renewed(sent_at, now)

    def _renew_former(self) -> None:
        for lease in tuple(self._former):
            try:
                lease.renew()
            except LeaseLostError:
                _log.warning("keys were lost with a former lease of another key key=%s", self.key)
                self._former.remove(lease)

    def _move(self, ttl_s: float) -> None:
        """Move the key to a lease with this time to live.

        Raises:
            LeaseLostError: another process deleted the key.
            UnavailableError: the key was not moved. Retry.
            OutcomeUnknownError: the key may have been moved. Retry.
        """
        sent_at = self._clock.now()
        found = self._coordinator.get(self.key)
        if found is None or found.create_revision != self.generation:
            raise LeaseLostError(f"{self.key} was deleted by another process")
        lease = self._tried.get(found.lease_id)
        if lease is not None:
            # An earlier attempt succeeded, but its reply was lost.
            sometimes("a key had moved to a new lease although the reply was lost")
            lease.renew()
        else:
            lease = self._coordinator.grant(ttl_s)
            self._tried[lease.id] = lease
            with self._lock:
                # Until the key has moved, the shorter of the two times to live applies.
                self._tenure.ttl_s = min(self.ttl_s, lease.ttl_s)
            unchanged = ModifiedAt(self.key, found.mod_revision)
            result = self._coordinator.transact([unchanged], [Put(self.key, found.value, lease.id)])
            if not result.committed:
                raise UnavailableError(f"{self.key} was written by another process at the same time")
        unused = [each for each in (self._lease, *self._tried.values()) if each is not lease]
        with self._lock:
            if self._has_attached:
                unused.remove(self._lease)
                self._former.append(self._lease)
                self._has_attached = False
            self._lease, self._tenure.ttl_s = lease, lease.ttl_s
            self._tried, self._target_ttl_s = {}, None
        self._note_renewed(sent_at)
        for each in unused:
            with contextlib.suppress(FlightedlError):
                each.revoke()

    def _pause_s(self, *, is_troubled: bool) -> float:
        now = self._clock.now()
        limits_s = [lease.ttl_s / RENEWALS_PER_TTL for lease in self._former]
        with self._lock:
            return min(self._tenure.pause_s(now, is_troubled=is_troubled), *limits_s, math.inf)


def _claimed_after_all(coordinator: Coordinator, key: str, lease_id: int) -> int | None:
    """Return the generation if a claim whose outcome was unknown has succeeded."""
    with contextlib.suppress(UnavailableError):
        found = coordinator.get(key)
        if found is not None and found.lease_id == lease_id:
            sometimes("a key was claimed although the reply was lost")
            return found.create_revision
    return None


def _wait_until_free(coordinator: Coordinator, key: str, stop: threading.Event) -> None:
    """Wait until ``key`` is absent or may be absent, or until ``stop`` is set.

    Raises:
        UnavailableError: etcd is unreachable.
    """
    listing = coordinator.list(key)
    if all(entry.key != key for entry in listing.entries):
        return
    with contextlib.closing(coordinator.watch(key, listing.revision)) as watch, contextlib.suppress(CompactedError):
        while not stop.is_set():
            if any(isinstance(event, Removed) and event.key == key for event in watch.next(_WATCH_SLICE_S)):
                return
