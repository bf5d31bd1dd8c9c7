"""A coordinator in the memory of one process, used by other processes over Arrow Flight.

``coordinator_actions`` returns the server's verbs, and ``FlightCoordinator`` is the client. Every reply contains the
store's cluster id and a revision, by which the client notices another store. The server keeps no state of watches: a
watch repeats a request that waits in the server for a moment, and names the revision up to which it has seen all
events.

Both sides are processes of one group, and run the same version of flightedl.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec.structs import replace

from flightedl import ports
from flightedl.adapters.memory import MemoryCoordinator, MemoryLease
from flightedl.domain.recovery.store_history import Sighting, Witness
from flightedl.errors import (
    AuthenticationError,
    FlightedlError,
    OutcomeUnknownError,
    RolledBackError,
    UnavailableError,
    UsageError,
)
from flightedl.messages.base import Reply, Request, decode, encode
from flightedl.rpc.authentication import Credentials
from flightedl.rpc.call import Call
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import ServerIdentity

#: Role of the server that has these verbs.
ROLE = "master"
#: Maximum seconds for which the request of a watch waits in the server.
_WATCH_S = 0.5
#: Seconds between attempts of a watch to reach the server.
_PAUSE_S = 0.2


class _Question(Request, frozen=True, kw_only=True):
    #: A key, or a prefix of keys.
    key: str = ""
    after: int = 0
    wait_s: float = 0.0
    lease: int = 0
    ttl_s: float = 0.0
    created: list[ports.CreatedAt] = []  # noqa: RUF012 - structs copy their defaults
    modified: list[ports.ModifiedAt] = []  # noqa: RUF012 - likewise
    puts: list[ports.Put] = []  # noqa: RUF012 - likewise
    deletes: list[ports.Delete] = []  # noqa: RUF012 - likewise


class _Answer(Reply, frozen=True, kw_only=True):
    cluster: str = ""
    revision: int = 0
    #: In the answer to a watch, a removed key has the create_revision 0.
    entries: list[ports.Entry] = []  # noqa: RUF012 - structs copy their defaults
    is_committed: bool = False
    lease: int = 0
    ttl_s: float | None = None
    failure: Literal["", "lease lost", "compacted"] = ""


def coordinator_actions(inner: MemoryCoordinator) -> dict[str, Callable[[bytes, Call], bytes]]:
    """Return the actions by which other processes use this coordinator."""

    def answer(act: Callable[[MemoryCoordinator, _Question], _Answer | None], body: bytes, _: Call) -> bytes:
        question = decode(body, _Question)
        try:
            found = act(inner, question) or _Answer()
        except ports.LeaseLostError:
            found = _Answer(failure="lease lost")
        except ports.CompactedError:
            found = _Answer(failure="compacted")
        seen = inner.sighting()
        assert seen is not None, "a request has just seen the store"
        return encode(replace(found, cluster=seen.cluster, revision=found.revision or seen.revision))

    return {verb: partial(answer, act) for verb, act in _ACTS.items()}


def _transact(inner: MemoryCoordinator, question: _Question) -> _Answer:
    result = inner.transact([*question.created, *question.modified], [*question.puts, *question.deletes])
    entries = [entry for entry in result.entries.values() if entry is not None]
    return _Answer(is_committed=result.committed, revision=result.revision, entries=entries)


def _watch(inner: MemoryCoordinator, question: _Question) -> _Answer:
    with contextlib.closing(inner.watch(question.key, question.after)) as watch:
        events = watch.next(min(question.wait_s, _WATCH_S))
        found = (
            each.entry if isinstance(each, ports.Written) else ports.Entry(each.key, b"", 0, each.revision)
            for each in events
        )
        return _Answer(entries=list(found), revision=watch.revision)


_ACTS: dict[str, Callable[[MemoryCoordinator, _Question], _Answer | None]] = {
    "coordinator_get": lambda inner, asked: _Answer(entries=[it] if (it := inner.get(asked.key)) else []),
    "coordinator_list": lambda inner, asked: _Answer(
        entries=list((found := inner.list(asked.key)).entries), revision=found.revision
    ),
    "coordinator_transact": _transact,
    "coordinator_grant": lambda inner, asked: _Answer(lease=(it := inner.grant(asked.ttl_s)).id, ttl_s=it.ttl_s),
    "coordinator_renew": lambda inner, asked: MemoryLease(inner, asked.lease, asked.ttl_s).renew(),
    "coordinator_revoke": lambda inner, asked: MemoryLease(inner, asked.lease, asked.ttl_s).revoke(),
    "coordinator_lease_ttl_s": lambda inner, asked: _Answer(ttl_s=inner.lease_ttl_s(asked.lease)),
    "coordinator_watch": _watch,
}


@dataclass(frozen=True, slots=True)
class FlightAccess:
    """Address of a group's own master, and this process's credentials there."""

    address: str
    job: str
    credentials: Credentials | None


class FlightCoordinator:
    """See ``ports.Coordinator``. If a Put names an expired lease, ``transact`` only raises LeaseLostError."""

    def __init__(self, access: FlightAccess, *, timeout_s: float = 2.0, clock: ports.Clock) -> None:
        expected = ServerIdentity(access.job, ROLE)
        #: None if this object is closed.
        self._connection: Connection | None = Connection(
            access.address, expected=expected, credentials=access.credentials
        )
        self.timeout_s = timeout_s
        self.clock = clock
        self._lock = threading.Lock()
        self._witness = Witness()

    @property
    def is_closed(self) -> bool:
        return self._connection is None

    def sighting(self) -> Sighting | None:
        return self._witness.seen

    def get(self, key: str) -> ports.Entry | None:
        found = self.ask("get", _Question(key=key)).entries
        return found[0] if found else None

    def list(self, prefix: str) -> ports.Listing:
        answer = self.ask("list", _Question(key=prefix))
        return ports.Listing(tuple(answer.entries), answer.revision)

    def transact(self, when: Sequence[ports.Condition], then: Sequence[ports.Operation]) -> ports.TransactionResult:
        question = _Question(
            created=[each for each in when if isinstance(each, ports.CreatedAt)],
            modified=[
                ports.ModifiedAt(each.key, 0) if isinstance(each, ports.Absent) else each
                for each in when
                if not isinstance(each, ports.CreatedAt)
            ],
            puts=[each for each in then if isinstance(each, ports.Put)],
            deletes=[each for each in then if isinstance(each, ports.Delete)],
        )
        answer = self.ask("transact", question, is_repeatable=False)
        found = {each.key: each for each in answer.entries}
        entries = {} if answer.is_committed else {each.key: found.get(each.key) for each in when}
        return ports.TransactionResult(answer.is_committed, answer.revision, entries)

    def grant(self, ttl_s: float) -> FlightLease:
        answer = self.ask("grant", _Question(ttl_s=ttl_s))
        return FlightLease(answer.lease, answer.ttl_s or ttl_s, self)

    def lease_ttl_s(self, lease_id: int) -> float | None:
        return self.ask("lease_ttl_s", _Question(lease=lease_id)).ttl_s

    def watch(self, prefix: str, after_revision: int) -> FlightWatch:
        return FlightWatch(self, prefix, after_revision)

    def close(self) -> None:
        # The connection is closed when the last call that uses it has ended.
        self._connection = None

    def ask(
        self, verb: str, question: _Question, *, timeout_s: float | None = None, is_repeatable: bool = True
    ) -> _Answer:
        """Send a request. Raises the errors that ``ports.Coordinator`` describes, and those of leases and watches."""
        if self._witness.broken_because:
            raise RolledBackError(self._witness.broken_because)
        connection, before, timeout_s = self._connection, self._witness.seen, timeout_s or self.timeout_s
        if connection is None:
            raise UnavailableError("the connection to the group's master was closed by this process")
        try:
            body = connection.action(f"coordinator_{verb}", encode(question), timeout_s=timeout_s)
        except (UsageError, AuthenticationError):
            raise
        except FlightedlError as error:
            remedy = "check that this machine can reach it, or set FLIGHTEDL_ETCD on all ranks to use an etcd"
            text = f"the group's master at {connection.address} does not answer ({error}): {remedy}"
            if is_repeatable or isinstance(error, UnavailableError):
                raise UnavailableError(text) from None
            raise OutcomeUnknownError(text) from None
        answer = decode(body, _Answer)
        with self._lock:
            broken_because = self._witness.saw(before, Sighting(answer.cluster, answer.revision))
        if broken_because:
            raise RolledBackError(broken_because)
        if answer.failure == "lease lost":
            raise ports.LeaseLostError("the lease has ended")
        if answer.failure == "compacted":
            raise ports.CompactedError("the events after the last one seen are gone: list again")
        return answer


@dataclass(frozen=True, slots=True)
class FlightLease:
    """See ``ports.Lease``."""

    id: int
    ttl_s: float
    _coordinator: FlightCoordinator

    def renew(self) -> None:
        self._coordinator.ask("renew", _Question(lease=self.id, ttl_s=self.ttl_s))

    def revoke(self) -> None:
        self._coordinator.ask("revoke", _Question(lease=self.id))


class FlightWatch:
    """See ``ports.Watch``."""

    def __init__(self, coordinator: FlightCoordinator, prefix: str, after_revision: int) -> None:
        self._coordinator = coordinator
        self._prefix = prefix
        self._revision = after_revision
        self._closed = threading.Event()

    def next(self, timeout_s: float) -> tuple[ports.WatchEvent, ...]:
        coordinator, clock = self._coordinator, self._coordinator.clock
        deadline = clock.now() + timeout_s
        while not (self._closed.is_set() or coordinator.is_closed):
            wait_s = max(min(deadline - clock.now(), _WATCH_S), 0.0)
            question = _Question(key=self._prefix, after=self._revision, wait_s=wait_s)
            try:
                answer = coordinator.ask("watch", question, timeout_s=coordinator.timeout_s + wait_s)
            except UnavailableError:
                clock.sleep(min(wait_s, _PAUSE_S))
            else:
                self._revision = answer.revision
                if answer.entries and not self._closed.is_set():
                    return tuple(
                        ports.Written(each) if each.create_revision else ports.Removed(each.key, each.mod_revision)
                        for each in answer.entries
                    )
            if clock.now() >= deadline:
                break
        return ()

    def close(self) -> None:
        self._closed.set()
