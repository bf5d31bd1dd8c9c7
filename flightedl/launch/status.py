"""Client for a job's master, used by tools.

A call looks up the master's address in etcd, connects (or reuses the connection if address and generation have not
changed), and sends the action. It never retries, because all callers poll.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from flightedl.config import CommonSettings
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.records import ServerRecord
from flightedl.domain.groups.incarnation import SILENT
from flightedl.errors import (
    DeadlineError,
    FencedError,
    FlightedlError,
    NotFoundError,
    OutcomeUnknownError,
    UnavailableError,
)
from flightedl.launch.failed import failed_tasks
from flightedl.launch.policy import Account
from flightedl.messages.base import OfJob, decode, encode
from flightedl.messages.checkpoints import CheckpointReply, CheckpointRequest
from flightedl.messages.decoding import from_json
from flightedl.messages.reading import ReadCommand
from flightedl.messages.scaling import ScaleReply, ScaleRequest
from flightedl.messages.status import GroupStatus, StatusReply
from flightedl.ports import Clock
from flightedl.rpc.authentication import Role
from flightedl.rpc.client import Connection
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller, ServerIdentity
from flightedl.rpc.routes import Endpoints

Answer = TypeVar("Answer", bound=msgspec.Struct)
Returned = TypeVar("Returned")

_ANSWER_TIMEOUT_S = 2.0
#: Longer, because the restart policy needs the answer, and a busy master may be slow. A dead master fails immediately.
_ACCOUNT_TIMEOUT_S = 5.0
#: Seconds for which the master holds a request about a change to the pservers, and timeout of each call.
_SCALE_WAIT_S, _SCALE_CALL_S = 0.5, 5.0
#: Seconds between two attempts. Also the minimum timeout of an attempt, so that a timeout of 0 allows one attempt.
_PAUSE_S = 0.1
_LAST_LOOK_S = 0.5
#: Seconds after which a command ends if it has never reached etcd, and says what it is waiting for, otherwise.
_UNREACHED_S, _SAY_S = 2.0, 10.0
#: Maximum seconds without a registered master, for commands that have seen one.
_GONE_S = 30.0


def tool_connector(tls_dir: str) -> Connector:
    """Return a connector for tools, which have the role of an admin."""
    return Connector(Caller("tool", "status"), Role.ADMIN, tls_dir)


def is_master_answering(
    record: ServerRecord, job: str, connector: Connector, timeout_s: float = _ANSWER_TIMEOUT_S
) -> bool:
    """True if the master named in this record answers in time."""
    try:
        with _connection(record, job, connector) as connection:
            connection.action("status", b"{}", timeout_s=timeout_s)
    except FlightedlError:
        return False
    return True


def _connection(record: ServerRecord, job: str, connector: Connector) -> Connection:
    return connector.connect(record.address, ServerIdentity(job, "master", 0, record.generation))


class JobStatus:
    """A connection to the master of one job. Thread-safe, but serves one caller at a time.

    Args:
        chosen: Settings that name the job, its etcd, and the directory with an admin's or a reader's certificate.
        clock: The process's clock.
    """

    def __init__(self, chosen: CommonSettings, clock: Clock) -> None:
        self._job = chosen.job
        self._etcd = chosen.etcd
        self._coordinator = open_coordinator(chosen, clock=clock)
        self._connector = tool_connector(chosen.tls_dir)
        self._lock = threading.Lock()
        self._known: tuple[ServerRecord, Connection] | None = None
        #: True once etcd has answered.
        self.is_reached = False

    def master(self) -> ServerRecord | None:
        """Return the current master, or None. Raises UnavailableError if etcd does not answer."""
        entry = self._coordinator.get(JobKeys(self._job).master_address)
        return None if entry is None else from_json(entry.value, ServerRecord)

    def read(self, timeout_s: float) -> StatusReply:
        """Return the job's status. Raises the same errors as ``ask``."""
        return self.ask("status", b"{}", StatusReply, timeout_s)

    def checkpoint(self, request: CheckpointRequest, timeout_s: float) -> CheckpointReply:
        """Request a checkpoint from the master, or ask if one is complete. Raises the same errors as ``ask``."""
        return self.change("checkpoint", request, CheckpointReply, timeout_s)

    def scaling(self) -> ScaleReply:
        """Return the progress of a change to the pservers, after waiting briefly. Raises the same errors as ``ask``."""
        return self.change("scale", ScaleRequest(wait_s=_SCALE_WAIT_S), ScaleReply, _SCALE_CALL_S)

    def change(self, verb: str, request: OfJob, kind: type[Answer], timeout_s: float) -> Answer:
        """Send a request that changes the job. Raises the same errors as ``ask``."""
        return self.ask(verb, encode(replace(request, job=self._job)), kind, timeout_s)

    def ask(self, verb: str, body: bytes, kind: type[Answer], timeout_s: float) -> Answer:
        """Send an action to the master.

        Raises:
            NotFoundError: no master of this job is registered in etcd.
            UnavailableError: etcd or the master does not answer.
            FlightedlError: the master replied with an error.
        """
        return decode(self._on_master(lambda master: master.action(verb, body, timeout_s=timeout_s)), kind)

    def flights(self, prefix: str, timeout_s: float) -> list[Endpoints]:
        """Return the locations of all parameters and tables with this prefix. Raises the same errors as ``ask``."""
        return self._on_master(lambda master: master.flights(prefix.encode(), timeout_s=timeout_s))

    def columns(self, command: ReadCommand, timeout_s: float) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Return the columns of a parameter or table, and its record batches. Raises the same errors as ``ask``.

        Args:
            command: Name, state and rows to read.
            timeout_s: Time limit of each call.
        """
        found = self._on_master(lambda master: master.info(encode(command), timeout_s=timeout_s))

        def batches() -> Iterator[pa.RecordBatch]:
            for endpoint in found.endpoints:
                with (
                    self._connector.connect(endpoint.addresses[0], None) as connection,
                    connection.get(endpoint.ticket, timeout_s=timeout_s) as stream,
                ):
                    yield from (batch for batch, _ in stream if batch is not None)

        return found.schema, batches()

    def _on_master(self, call: Callable[[Connection], Returned]) -> Returned:
        with self._lock:
            record = self.master()
            self.is_reached = True
            if record is None:
                raise NotFoundError(f"job {self._job} is not running at etcd {self._etcd}: it has no master")
            try:
                return call(self._connection(record))
            except FencedError:
                # The master was replaced after the lookup. Its successor is about to register.
                raise NotFoundError(f"the master of job {self._job} is being replaced: try again in a moment") from None

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._disconnect()
        self._coordinator.close()

    def _connection(self, record: ServerRecord) -> Connection:
        if self._known is not None and self._known[0] == record:
            return self._known[1]
        self._disconnect()
        connection = _connection(record, self._job, self._connector)
        self._known = (record, connection)
        return connection

    def _disconnect(self) -> None:
        known, self._known = self._known, None
        if known is not None:
            known[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def follow_change(
    ask: Callable[[], ScaleReply], timeout_s: float, clock: Clock, show: Callable[[ScaleReply], None] = lambda _: None
) -> ScaleReply:
    """Wait until a change to the pservers has ended, at most ``timeout_s``. Pass each reply of ``ask`` to ``show``.

    Raises:
        UnavailableError: the master did not answer in time.
    """

    def shown(_left_s: float) -> ScaleReply:
        reply = ask()
        show(reply)
        return reply

    return answered_within(timeout_s, clock, shown, lambda reply: reply.is_done, has_seen_master=True)


def answered_within(
    timeout_s: float,
    clock: Clock,
    ask: Callable[[float], Answer],
    is_enough: Callable[[Answer], bool],
    *,
    is_reached: Callable[[], bool] = lambda: True,
    has_seen_master: bool = False,
) -> Answer:
    """Repeat ``ask`` until its answer is sufficient or the time is up. Return the latest answer.

    A master may die before or after it has carried out the request, and its successor takes over. So the request must
    be one that may be carried out twice. While no master answers, stderr says so.

    Args:
        timeout_s: Maximum seconds for all attempts.
        clock: The process's clock.
        ask: Receives the number of seconds that remain. It must return or raise within that time.
        is_enough: True if no more answers are needed.
        is_reached: False as long as etcd has never answered.
        has_seen_master: True if a master is known to have existed.

    Raises:
        UnavailableError: there was no answer in time; names the last error.
        FlightedlError: an error that a retry cannot solve.
    """
    began = silent_since = clock.now()
    deadline, say_at = began + timeout_s, began + _SAY_S
    answer = None
    while True:
        trouble = ""
        try:
            answer = ask(max(deadline - clock.now(), _LAST_LOOK_S))
            silent_since = clock.now()
        except NotFoundError as error:
            if not has_seen_master or clock.now() - silent_since >= _GONE_S:
                raise
            trouble = str(error)
        except (UnavailableError, DeadlineError, OutcomeUnknownError) as error:
            trouble = str(error)
            if not is_reached() and clock.now() - began >= _UNREACHED_S:
                raise
        has_seen_master |= is_reached() and bool(answer or trouble)
        is_over = clock.now() >= deadline
        if answer is not None and (is_over or is_enough(answer)):
            return answer
        if is_over:
            raise UnavailableError(f"no answer within {timeout_s:.3g} s; the last attempt: {trouble}")
        if trouble and clock.now() >= say_at:
            sys.stderr.write(f"no answer for {clock.now() - silent_since:.0f} s, trying again: {trouble}\n")
            say_at = clock.now() + _SAY_S
        clock.sleep(_PAUSE_S)


def account_of(status: JobStatus) -> Account | None:
    """Return the job's account for the restart policy, or None if the job's master does not answer."""
    try:
        reply = status.read(_ACCOUNT_TIMEOUT_S)
    except FlightedlError:
        return None
    has_trained = reply.batches > 0 or reply.tasks.done > 0 or reply.epoch > 0
    if reply.group is not None:
        return _account_of_group(reply, reply.group)
    worst = max(reply.raised, key=lambda each: each.batches - each.repeated, default=None)
    return Account(
        has_trained,
        reply.state == "done",
        reply.tasks.attempts,
        failed_tasks(reply),
        0 if worst is None else worst.batches - worst.repeated,
        "" if worst is None else f"{worst.error} ({worst.place})",
        0 if worst is None else worst.trainers,
        frozenset(reply.in_doubt),
        frozenset(reply.given_up),
    )


def _account_of_group(reply: StatusReply, group: GroupStatus) -> Account:
    """Return the account of a job whose data is read by a group, where each start is an attempt at the work."""
    errors = Counter(piece.error for piece in reply.failed if piece.error != SILENT)
    ((error, count),) = errors.most_common(1) or [("", 0)]
    return Account(True, reply.state == "done", group.starts, len(reply.failed), count, error)
