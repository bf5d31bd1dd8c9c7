"""Implementation of ``ports.Coordinator`` on etcd v3, with the generated stubs of cslab-etcd3 on our own gRPC channels.

Rules:

* Every call has a deadline. A call that the server rejected, or that was never sent, is distinguished from a call that
  may have been executed. Connecting times out before the call does, so if gRPC reports a failure to connect or to
  resolve the name, the call was not sent. For any other failure after sending, the outcome is *unknown*.
* If a call exceeds its deadline, its connection is replaced, because a frozen or half-open connection never completes
  the calls queued on it. Several endpoints are tried in turn, beginning with the one that answered last.
* A watch has its own connection, and is driven by the thread that calls ``next``. That thread opens the stream. If the
  stream is silent, it requests progress; if there is still no answer, it opens another stream that resumes after the
  last revision seen. Events are filtered by revision, so none is delivered twice. A rollback of etcd is reported like a
  compaction: the caller lists the keys again, and then detects the rollback.
* Every answer contains etcd's cluster id and revision. An answer that contradicts an earlier one ends all work on this
  etcd (``domain.recovery.store_history``). Renewals, watches and lease requests may be answered by a lagging member, so
  the revisions in their answers prove nothing.
* A lease renewal that has not been answered within a quarter of the time to live is abandoned, so that the holder can
  retry on another connection before the lease counts as lost.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import etcd3.etcdrpc as rpc
import grpc  # type: ignore[import-untyped]

from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.domain.etcd_versions import Version, version_of
from flightedl.domain.recovery.store_history import Sighting, Witness
from flightedl.errors import (
    AuthenticationError,
    FlightedlError,
    OutcomeUnknownError,
    RolledBackError,
    UnavailableError,
    UsageError,
)
from flightedl.ports import (
    Absent,
    Clock,
    CompactedError,
    Condition,
    CreatedAt,
    Delete,
    Entry,
    LeaseLostError,
    Listing,
    ModifiedAt,
    Operation,
    Put,
    Removed,
    TransactionResult,
    WatchEvent,
    Written,
)

#: Limit of etcd. Checking it here allows the error to suggest a remedy.
OPERATIONS_LIMIT = 128

_QUIET_S = 2.0
#: Minimum timeout of a renewal in seconds. Prevents the loss of short leases on a busy machine.
_RENEWAL_FLOOR_S = 0.5
_REOPEN_PAUSE_S = 0.2
_CLOSED = "the connection to etcd was closed by this process"
_NEVER_SENT = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving ")

#: Returns a connection's stub method, to be called with a request and a ``timeout``.
_Method = Callable[["_Connection"], Callable[..., Any]]


class EtcdCoordinator:
    """See ``ports.Coordinator``. If a Put names an expired lease, ``transact`` does nothing and raises LeaseLostError.

    Args:
        access: etcd's address and this process's credentials. A string is ``host:port``, or a comma-separated list, in
            plain text.
        timeout_s: Time limit of each call.
        clock: The process's clock.
    """

    def __init__(self, access: EtcdAccess | str, *, timeout_s: float = 2.0, clock: Clock) -> None:
        self._access = EtcdAccess(access) if isinstance(access, str) else access
        self._endpoints = self._access.each_endpoint
        if not self._endpoints:
            raise UsageError("no etcd address given: set FLIGHTEDL_ETCD to host:port")
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._current = 0
        self._connections: dict[int, _Connection] = {}
        #: Replaced connections that may still have calls in flight, with the time by which these calls will have ended.
        self._retired: list[tuple[float, _Connection]] = []
        self._watches: set[EtcdWatch] = set()
        self._is_closed = False
        self._history = _History()

    def sighting(self) -> Sighting | None:
        return self._history.seen

    def get(self, key: str) -> Entry | None:
        reply = self._ask(lambda connection: connection.kv.Range, rpc.RangeRequest(key=key.encode()))
        return _entry(reply.kvs[0]) if reply.kvs else None

    def list(self, prefix: str) -> Listing:
        start, end = _range(prefix)
        reply = self._ask(lambda connection: connection.kv.Range, rpc.RangeRequest(key=start, range_end=end))
        return Listing(tuple(_entry(kv) for kv in reply.kvs), reply.header.revision)

    def transact(self, when: Sequence[Condition], then: Sequence[Operation]) -> TransactionResult:
        request, keys = _transaction(when, then)
        reply = self._ask(lambda connection: connection.kv.Txn, request, is_repeatable=False)
        entries: dict[str, Entry | None] = {}
        if not reply.succeeded:
            for key, response in zip(keys, reply.responses, strict=True):
                kvs = response.response_range.kvs
                entries[key] = _entry(kvs[0]) if kvs else None
        return TransactionResult(reply.succeeded, reply.header.revision, entries)

    def grant(self, ttl_s: float) -> EtcdLease:
        reply = self._ask(lambda connection: connection.lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        return EtcdLease(reply.ID, float(reply.TTL), self._ask, self._timeout_s)

    def lease_ttl_s(self, lease_id: int) -> float | None:
        request = rpc.LeaseTimeToLiveRequest(ID=lease_id)
        reply = self._ask(lambda connection: connection.lease.LeaseTimeToLive, request, is_current=False)
        return None if reply.TTL < 0 else float(reply.grantedTTL)

    def watch(self, prefix: str, after_revision: int) -> EtcdWatch:
        watch = EtcdWatch(
            self._access, prefix, after_revision, self._timeout_s, self._clock, self._history, self._forget
        )
        with self._lock:
            if self._is_closed:
                raise UnavailableError(_CLOSED)
            self._watches.add(watch)
        return watch

    def version(self) -> tuple[Version, int]:
        """Return the version of the member that answers, and the number of members. Not part of the port."""
        status = self._ask(lambda connection: connection.maintenance.Status, rpc.StatusRequest(), is_current=False)
        members = self._ask(lambda connection: connection.cluster.MemberList, rpc.MemberListRequest(), is_current=False)
        return version_of(status.version), len(members.members)

    def is_full(self) -> bool:
        """True if a member's database has reached its quota, so that etcd rejects all writes. Not part of the port."""
        request = rpc.AlarmRequest(action=rpc.AlarmRequest.GET)
        found = self._ask(lambda connection: connection.maintenance.Alarm, request, is_current=False)
        return any(each.alarm == rpc.NOSPACE for each in found.alarms)

    def compact(self) -> None:
        """Make etcd discard all past events. Only the owner of this etcd may do this, so it is not part of the port."""
        request = rpc.CompactionRequest(revision=self.list("/").revision, physical=True)
        self._ask(lambda connection: connection.kv.Compact, request)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            watches = list(self._watches)
            connections = [*self._connections.values(), *(connection for _, connection in self._retired)]
            self._connections.clear()
            self._retired.clear()
        for watch in watches:
            watch.close()
        for connection in connections:
            connection.close()

    def _forget(self, watch: EtcdWatch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def _ask(
        self,
        method: _Method,
        request: Any,
        timeout_s: float | None = None,
        *,
        is_repeatable: bool = True,
        is_current: bool = True,
    ) -> Any:
        """Send to the endpoint that answered last. Try another one only if the request was certainly not executed.

        Set ``is_current`` for requests that a lagging member of etcd never answers.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = self._clock.now() + timeout_s
        tries_left = len(self._endpoints)
        while True:
            tries_left -= 1
            index, connection = self._connection()
            before = self._history.require()
            try:
                reply = method(connection)(request, timeout=max(deadline - self._clock.now(), 0.001))
            except grpc.RpcError as error:
                is_stuck = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if is_stuck or error.code() is grpc.StatusCode.UNAVAILABLE:
                    self._switch_from(index, connection, is_stuck=is_stuck)
                if tries_left and _was_never_sent(error) and self._clock.now() < deadline:
                    continue
                raise _meaning(error, self._endpoints[index], timeout_s, is_repeatable=is_repeatable) from None
            except ValueError:  # gRPC raises ValueError on a closed channel.
                raise UnavailableError(_CLOSED) from None
            if reply.header.cluster_id:  # Replies about alarms have no header.
                self._history.saw(before, reply.header, is_current=is_current)
            return reply

    def _connection(self) -> tuple[int, _Connection]:
        with self._lock:
            if self._is_closed:
                raise UnavailableError(_CLOSED)
            index = self._current
            if index not in self._connections:
                self._connections[index] = _Connection(self._access, self._endpoints[index], self._timeout_s)
            return index, self._connections[index]

    def _switch_from(self, index: int, connection: _Connection, *, is_stuck: bool) -> None:
        now = self._clock.now()
        with self._lock:
            if index == self._current:
                self._current = (index + 1) % len(self._endpoints)
            if is_stuck and self._connections.get(index) is connection:
                del self._connections[index]
                self._retired.append((now + self._timeout_s, connection))
            over = [retired for end, retired in self._retired if end < now]
            self._retired = [(end, retired) for end, retired in self._retired if end >= now]
        for retired in over:
            retired.close()


class _History:
    """History of etcd as observed on this connection. Thread-safe. See ``domain.recovery.store_history``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._witness = Witness()

    @property
    def seen(self) -> Sighting | None:
        return self._witness.seen

    def require(self) -> Sighting | None:
        """Return the highest revision seen. Raises RolledBackError if etcd has been rolled back."""
        if self._witness.broken_because:
            raise RolledBackError(self._witness.broken_because)
        return self._witness.seen

    def saw(self, before: Sighting | None, header: Any, *, is_current: bool) -> None:
        now = Sighting(f"{header.cluster_id:016x}", header.revision)
        with self._lock:
            broken_because = self._witness.saw(before, now, is_current=is_current)
        if broken_because:
            raise RolledBackError(broken_because)


class EtcdLease:
    """See ``ports.Lease``."""

    def __init__(self, lease_id: int, ttl_s: float, ask: Callable[..., Any], timeout_s: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self._ask = ask
        self._timeout_s = timeout_s

    def renew(self) -> None:
        timeout_s = min(self._timeout_s, max(self.ttl_s / 4, _RENEWAL_FLOOR_S))
        request = rpc.LeaseKeepAliveRequest(ID=self.id)
        if self._ask(lambda connection: connection.keep_alive, request, timeout_s, is_current=False).TTL <= 0:
            raise LeaseLostError(f"lease {self.id:x} has ended")

    def revoke(self) -> None:
        with contextlib.suppress(LeaseLostError):
            self._ask(lambda connection: connection.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=self.id))


@dataclass(slots=True, eq=False)
class EtcdWatch:
    """See ``ports.Watch``."""

    _access: EtcdAccess
    _prefix: str
    #: Revision up to which all events have been received. Repeated events are dropped.
    _revision: int
    _timeout_s: float
    _clock: Clock
    _history: _History
    _on_close: Callable[[EtcdWatch], None]
    #: The class is looked up when a watch is created, because tests of schedules replace it.
    _condition: threading.Condition = field(init=False, default_factory=lambda: threading.Condition())  # noqa: PLW0108
    _events: deque[WatchEvent] = field(init=False, default_factory=deque)
    _stream: _Stream | None = field(init=False, default=None)
    _stream_count: int = field(init=False, default=0)
    #: Time from which a missing stream is opened.
    _reopen_at: float = field(init=False, default=-math.inf)
    _received_at: float = field(init=False, default=0.0)
    #: Time of the last progress request; None if anything has been received since then.
    _probed_at: float | None = field(init=False, default=None)
    _is_compacted: bool = field(init=False, default=False)
    _is_closed: bool = field(init=False, default=False)

    def next(self, timeout_s: float) -> tuple[WatchEvent, ...]:
        deadline = self._clock.now() + timeout_s
        while True:
            with self._condition:
                if self._events and not self._is_closed:
                    events = tuple(self._events)
                    self._events.clear()
                    return events
                self._history.require()
                if self._is_compacted:
                    raise CompactedError("etcd no longer has the events after the last one seen: list again")
                if self._is_closed:
                    return ()
                abandoned = self._supervise(self._clock.now())
                wait_s = min(deadline, self._due()) - self._clock.now()
                if abandoned is None and wait_s > 0:
                    self._condition.wait(wait_s)
            if abandoned is not None:
                abandoned.close()
            elif self._clock.now() >= deadline and not self._events:
                return ()

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            stream, self._stream = self._stream, None
            self._condition.notify_all()
        if stream is not None:
            stream.close()
        self._on_close(self)

    def _due(self) -> float:
        if self._stream is None:
            return self._reopen_at
        return self._received_at + _QUIET_S if self._probed_at is None else self._probed_at + self._timeout_s

    def _supervise(self, now: float) -> _Stream | None:
        """Open, probe or abandon the stream, whichever is due. Return a stream that the caller must close, or None."""
        if now < self._due():
            return None
        if self._stream is None:
            self._stream = self._open()
            self._received_at = now
            self._probed_at = None
        elif self._probed_at is None:
            self._stream.ask_for_progress()
            self._probed_at = now
        else:
            stream, self._stream = self._stream, None
            self._reopen_at = now
            return stream
        return None

    def _open(self) -> _Stream:
        endpoints = self._access.each_endpoint
        endpoint = endpoints[self._stream_count % len(endpoints)]
        self._stream_count += 1
        start, end = _range(self._prefix)
        # Resume at the last revision seen, not at the next one. If etcd before 3.4.34 or 3.5.15 is compacted at exactly
        # the revision at which a key was deleted, it loses the deletion, and reports this only to watchers that start
        # at an earlier revision.
        create = rpc.WatchCreateRequest(key=start, range_end=end, start_revision=max(self._revision, 1))
        connection = _Connection(self._access, endpoint, self._timeout_s)
        return _Stream(connection, rpc.WatchRequest(create_request=create), self._received, self._ended)

    def _received(self, stream: _Stream, reply: Any) -> None:
        with self._condition:
            if stream is not self._stream:
                return
            self._received_at = self._clock.now()
            self._probed_at = None
            with contextlib.suppress(RolledBackError):  # The error is raised in the thread that waits for events.
                self._history.saw(self._history.seen, reply.header, is_current=False)
            if reply.compact_revision or (reply.created and reply.header.revision < self._revision):
                self._is_compacted = True
            for event in reply.events:
                if event.kv.mod_revision > self._revision:
                    self._events.append(_event(event))
            if reply.events:
                self._revision = max(self._revision, reply.events[-1].kv.mod_revision)
            self._condition.notify_all()

    def _ended(self, stream: _Stream) -> None:
        with self._condition:
            if stream is self._stream:
                self._stream = None
                self._reopen_at = self._clock.now() + _REOPEN_PAUSE_S
                self._condition.notify_all()


class _Stream:
    """One watch RPC on its own connection. A thread reads the stream, and ends when the stream ends."""

    def __init__(
        self,
        connection: _Connection,
        first: Any,
        on_reply: Callable[[_Stream, Any], None],
        on_end: Callable[[_Stream], None],
    ) -> None:
        self._connection = connection
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(first)
        self._on_reply = on_reply
        self._on_end = on_end
        self._call = connection.watch.Watch(iter(self._requests.get, None))
        threading.Thread(target=self._read, name="flightedl-etcd-watch", daemon=True).start()

    def ask_for_progress(self) -> None:
        self._requests.put(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))

    def close(self) -> None:
        self._call.cancel()

    def _read(self) -> None:
        try:
            for reply in self._replies():
                self._on_reply(self, reply)
                if reply.canceled:
                    break
        finally:
            self._requests.put(None)
            self._call.cancel()
            self._connection.close()
            self._on_end(self)

    def _replies(self) -> Iterator[Any]:
        try:
            yield from self._call
        except grpc.RpcError:
            return


class _Connection:
    def __init__(self, access: EtcdAccess, endpoint: str, timeout_s: float) -> None:
        self._channel = access.channel(endpoint, timeout_s)
        self.kv = rpc.KVStub(self._channel)
        self.lease = rpc.LeaseStub(self._channel)
        self.watch = rpc.WatchStub(self._channel)
        self.cluster = rpc.ClusterStub(self._channel)
        self.maintenance = rpc.MaintenanceStub(self._channel)

    def keep_alive(self, request: Any, timeout: float) -> Any:
        """Renew a lease once, by a stream with a single request."""
        stream = self.lease.LeaseKeepAlive(iter((request,)), timeout=timeout)
        try:
            for reply in stream:
                return reply
        finally:
            stream.cancel()
        raise UnavailableError("etcd ended the renewal of a lease without an answer")

    def close(self) -> None:
        self._channel.close()


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Return the start and end of the range of all keys that begin with ``prefix``."""
    start = prefix.encode()
    return (start, start[:-1] + bytes((start[-1] + 1,))) if start else (b"\0", b"\0")


def _transaction(when: Sequence[Condition], then: Sequence[Operation]) -> tuple[Any, tuple[str, ...]]:
    if len(when) > OPERATIONS_LIMIT or len(then) > OPERATIONS_LIMIT:
        raise UsageError(f"a transaction has at most {OPERATIONS_LIMIT} conditions and as many operations: split it")
    keys = tuple(dict.fromkeys(condition.key for condition in when))
    request = rpc.TxnRequest(
        compare=[_compare(condition) for condition in when],
        success=[_operation(operation) for operation in then],
        failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode())) for key in keys],
    )
    return request, keys


def _compare(condition: Condition) -> Any:
    key = condition.key.encode()
    match condition:
        case Absent():
            return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=0)
        case CreatedAt(create_revision=revision):
            return rpc.Compare(key=key, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=revision)
        case ModifiedAt(mod_revision=revision):
            return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision)


def _operation(operation: Operation) -> Any:
    match operation:
        case Put(key=key, value=value, lease_id=lease_id):
            return rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease_id))
        case Delete(key=key):
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))


def _entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(errors="replace"), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _event(event: Any) -> WatchEvent:
    entry = _entry(event.kv)
    return Removed(entry.key, entry.mod_revision) if event.type else Written(entry)


def _was_never_sent(error: Any) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and (error.details() or "").startswith(_NEVER_SENT)


def _meaning(error: Any, endpoint: str, timeout_s: float, *, is_repeatable: bool) -> FlightedlError | LeaseLostError:
    """Convert a gRPC error to one of our errors. It is safe to send a repeatable request again."""
    code, details = error.code(), error.details() or ""
    if _was_never_sent(error):
        return UnavailableError(
            f"etcd at {endpoint} cannot be reached: start it, or set FLIGHTEDL_ETCD to the address where it runs"
        )
    if code is grpc.StatusCode.NOT_FOUND and "lease not found" in details:
        return LeaseLostError("the lease has ended")
    if code is grpc.StatusCode.INVALID_ARGUMENT or "larger than max" in details:
        return UsageError(f"etcd rejects this request: {details}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AuthenticationError(f"etcd at {endpoint} refused access: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return UnavailableError(f"etcd at {endpoint} has no room ({details}): compact and defragment it")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        reason = f"did not answer within {timeout_s:g} s"
    else:
        reason = f"broke off ({details or code.name})"
    if is_repeatable:
        return UnavailableError(f"etcd at {endpoint} {reason}: check that it runs there, or set FLIGHTEDL_ETCD")
    return OutcomeUnknownError(f"etcd at {endpoint} {reason}: the transaction may or may not have been executed")
