"""Group commit: the master's state is stored in etcd before any reply that depends on it is sent.

A single thread writes the current state, so that one transaction serves all waiting requests. Each request waits on its
own lock, so the completion of other requests does not wake it. If the last transaction served many requests, the thread
briefly waits for the same number of requests, because the same senders are likely to send again.

Each write is fenced by the lock's generation. It *also* compares the revisions of the keys that it overwrites (see
``domain.master.stored``). A master steps down in three cases: the outcome of its writes stays unknown until its lease
is at risk, it finds bytes that it did not write, or an unexpected error occurs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from flightedl.coordination.keeper import HeldKey
from flightedl.domain.master.stored import StoredKeys, Write
from flightedl.errors import FencedError, FlightedlError, NotReadyError, OutcomeUnknownError, UnavailableError
from flightedl.master.metrics import COMMIT_SECONDS, COMMITTED_BYTES
from flightedl.ports import Clock, Coordinator, Instruments, ModifiedAt, NoInstruments, Put

_log = logging.getLogger(__name__)

#: Returns the current state as (revision, key -> value).
Snapshot = Callable[[], tuple[int, Mapping[str, bytes]]]

_RETRY_S = 0.1
#: Maximum seconds to wait for as many requests as the last transaction served.
_GATHER_S = 0.005
#: The writer waits only if the last transaction served at least this many requests.
_CROWD = 8


class DurableState:
    """Writer of the state. Requests wait for it. Thread-safe.

    ``known`` maps keys to (value, mod_revision), as read after the lock was acquired. Absent keys are omitted.
    """

    def __init__(
        self,
        held: HeldKey,
        coordinator: Coordinator,
        clock: Clock,
        snapshot: Snapshot,
        step_down: Callable[[str], None],
        known: Mapping[str, tuple[bytes, int]],
        instruments: Instruments | None = None,
    ) -> None:
        self._held = held
        self._coordinator = coordinator
        self._clock = clock
        self._snapshot = snapshot
        self._step_down = step_down
        self._instruments = NoInstruments() if instruments is None else instruments
        self._stored = StoredKeys(known)
        #: Guards the following fields. Only the writer thread waits on this condition.
        self._changed = threading.Condition()
        #: (revision, lock to release once the revision is durable or can never become durable)
        self._waiters: list[tuple[int, threading.Lock]] = []
        self._wanted = 0
        self._durable = 0
        #: The writer is woken when this many requests are waiting.
        self._enough = 1
        self._trouble = ""
        self._is_stopping = False
        self.write_count = 0
        self._thread = threading.Thread(target=self._run, name="flightedl-durable", daemon=True)
        self._thread.start()

    def wait(self, revision: int, timeout_s: float) -> None:
        """Wait until the state with this ``revision`` or a later one is durable.

        Raises:
            NotReadyError: the timeout has expired. The request may be repeated.
        """
        waiter = threading.Lock()
        with self._changed:
            if self._durable >= revision:
                return
            if not self._is_stopping:
                waiter.acquire()
                self._waiters.append((revision, waiter))
                self._wanted = max(self._wanted, revision)
                if len(self._waiters) >= self._enough:
                    self._changed.notify()
        is_answered = waiter.acquire(timeout=timeout_s)
        if self._durable >= revision:  # The revision never decreases, so it can be read without a lock.
            return
        with self._changed:
            if self._durable >= revision:
                return
            self._waiters = [(other, lock) for other, lock in self._waiters if lock is not waiter]
        if not is_answered:
            raise NotReadyError(f"the master cannot save its state: {self._trouble or 'etcd is slow'}")
        raise NotReadyError("the master is stepping down: retry with its successor")

    def close(self) -> None:
        """Stop the thread. Requests whose state is not durable yet fail."""
        self._stop()
        self._thread.join(5.0)

    def _stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        for _, lock in waiters:
            lock.release()

    def _run(self) -> None:
        try:
            self._write_on()
        except FlightedlError as error:
            self._step_down(f"its state cannot be written: {error}")
        except Exception as error:  # noqa: BLE001 - see below
            # A master that cannot write its state must give up the lock, because it cannot answer any request.
            _log.exception("the state cannot be written")
            self._step_down(f"its state cannot be written: {error}")
        finally:
            self._stop()

    def _write_on(self) -> None:
        expected = 1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted > self._durable or self._is_stopping)
                if len(self._waiters) < expected >= _CROWD and not self._is_stopping:
                    self._enough = expected
                    self._changed.wait(_GATHER_S)
                    self._enough = 1
                if self._is_stopping:
                    return
            revision, values = self._snapshot()
            if not self._write(values):
                return
            with self._changed:
                self._durable = revision
                self._trouble = ""
                served = [lock for wanted, lock in self._waiters if wanted <= revision]
                self._waiters = [waiter for waiter in self._waiters if waiter[0] > revision]
                expected = len(served) + len(self._waiters)
            for lock in served:
                lock.release()

    def stored_at(self, key: str) -> int:
        """Return the revision of this master's last write to a key, or the revision that it found if it wrote none."""
        return self._stored.revision_of(key)

    def _write(self, values: Mapping[str, bytes]) -> bool:
        """Write the values. Retry if necessary. Return False if this master has stepped down."""
        write = self._stored.next_write(values)
        while write is not None and not self._is_stopping:
            if not self._held.is_held:
                self._step_down("its lease could not be renewed")
                return False
            try:
                began = self._clock.now()
                result = self._held.write(
                    [Put(key, value) for key, value in write.puts.items()],
                    [ModifiedAt(key, revision) for key, revision in write.compared.items()],
                )
                self.write_count += 1
                self._instruments.observe(COMMIT_SECONDS, self._clock.now() - began)
                self._instruments.count(COMMITTED_BYTES, sum(map(len, write.puts.values())))
                if result.committed:
                    self._stored.committed(write, result.revision)
                    return True
                if self._adopt(write):
                    return True
            except FencedError:
                self._step_down("another master holds the lock")
                return False
            except (UnavailableError, OutcomeUnknownError) as error:
                self._note(error)
            else:
                self._step_down("another process wrote its state")
                return False
        return write is None

    def _adopt(self, write: Write) -> bool:
        entries = {key: self._coordinator.get(key) for key in write.puts}
        found = {key: None if entry is None else (entry.value, entry.mod_revision) for key, entry in entries.items()}
        return self._stored.adopt(write, found)

    def _note(self, error: FlightedlError) -> None:
        if str(error) != self._trouble:
            _log.info("Cannot save state; retrying: %s", error)
        with self._changed:
            self._trouble = str(error)
        self._clock.sleep(_RETRY_S)
