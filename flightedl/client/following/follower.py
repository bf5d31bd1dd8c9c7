"""A follower: the threads that request changes from the pservers, and the copy of the model as users see it.

For each pserver, a thread requests the changes after the last applied position. Between two requests, the
thread pauses for about thirty times the duration of the last one, within limits. So a pserver spends at most a few
percent of its time on a follower, and changes arrive within a second.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from flightedl.adapters.clock import SystemClock
from flightedl.client.connections import Servers
from flightedl.client.following.consumer import ConsumerName
from flightedl.client.following.copy import FollowedModel
from flightedl.client.tables.ids import found_ids
from flightedl.config import CommonSettings, settings
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.domain.feed.follower import Use
from flightedl.domain.model.declared import plan_of
from flightedl.errors import DeadlineError, FlightedlError, MessageError, NotFoundError
from flightedl.kernels.half_precision import check_kind, float32_of
from flightedl.messages.base import decode, encode
from flightedl.messages.declarations import JobDeclaration
from flightedl.messages.feed import ChangesHeader, ChangesTicket
from flightedl.ports import Clock
from flightedl.process import tuning as process_tuning
from flightedl.process.fork_guard import GUARD
from flightedl.rpc.authentication import Role
from flightedl.rpc.client import Connection
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller
from flightedl.wire.changes import CHANGES_SCHEMA, HEADER_KEY, decode_changes

_log = logging.getLogger(__name__)

#: Seconds that a request waits for a change, and time limit of a request.
_WAIT_S = 0.5
_ANSWER_S = 120.0
#: Seconds that a request waits for a change while the follower waits for a checkpoint.
_MARK_WAIT_S = 5.0
#: Seconds for which a pserver's part stays at a checkpoint that the other parts have not reached. Shorter than the time
#: for which a pserver remembers that its checkpoints are to be marked.
_STOPPED_S = 10.0
_RETRY_S = 0.2
_LEAST_REST_S, _MOST_REST_S = 0.05, 1.0
#: Length of the pause after a request with changes, as a multiple of the request's duration.
_REST_FACTOR = 30


class FollowedTable:
    """A table in a follower's copy. Its rows can be read by id, or all together.

    Args:
        follower: The follower.
        name: Name of the table.
    """

    def __init__(self, follower: Follower, name: str) -> None:
        self._follower = follower
        self.name = name

    def lookup(self, ids: Any) -> npt.NDArray[np.float32]:
        """Return the values of rows.

        Args:
            ids: (n,) integers or strings, as in ``Table.pull``.

        Returns:
            (n, dim) float32. For ids without a row, what the table's ``unknown`` determines.

        Raises:
            NotFoundError: an id has no row, and the table was declared with ``unknown="error"``.
        """
        model = self._follower.model()
        wanted, places = np.unique(found_ids(self.name, ids).ids, return_inverse=True)
        values, count = model.read(self.name, wanted)
        spec = next(spec for spec in model.plan.tables if spec.name == self.name)
        if count < wanted.size and spec.unknown == "error":
            raise NotFoundError(f"{wanted.size - count} of {wanted.size} ids have no row in table {self.name!r}")
        found: npt.NDArray[np.float32] = values[places]
        return found

    def rows(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the ids (n,) and values (n, dim) of all rows."""
        model = self._follower.model()
        spec = next(spec for spec in model.plan.tables if spec.name == self.name)
        ids, values = model.rows(self.name)
        values = values.reshape(ids.size, spec.dim)
        if spec.dtype != "float32":
            values = float32_of(values, spec.dtype)
        return ids.view(np.int64), values


class Follower(Mapping[str, npt.NDArray[Any]]):
    """A copy of a running job's model, kept up to date. Use it as a context manager; it is thread-safe.

    The mapping's keys are the names of parameters, and its values are arrays, which never change: to get newer values,
    read the parameter again. ``tables`` maps names to tables.

    Args:
        etcd: ``host:port`` of etcd. The default is ``FLIGHTEDL_ETCD``.
        job: The job's name. The default is ``FLIGHTEDL_JOB``.
        wire: "bfloat16" or "float16" to receive float32 values rounded to 16 bits, which halves the network traffic.
        name: Name of this follower as a consumer of the job, for ``flightedl status``. Only one live process has it.
        **more: Other fields of :class:`flightedl.config.CommonSettings`, for example ``tls_dir``.

    Raises:
        UsageError: a setting is invalid, or another live process holds the name.
        UnavailableError: etcd, which stores the name, cannot be reached.
    """

    def __init__(
        self,
        etcd: str | None = None,
        job: str | None = None,
        wire: str | None = None,
        name: str | None = None,
        **more: Any,
    ) -> None:
        process_tuning.apply()
        self._wire: Any = wire or ""
        check_kind(self._wire)
        chosen = settings(CommonSettings, etcd=etcd, job=job, **more)
        connector = Connector(Caller("reader", "follower"), Role.READER, chosen.tls_dir, chosen.integrity, "never")
        self._clock: Clock = SystemClock()
        self._keys = JobKeys(chosen.job)
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._lock = threading.Lock()
        self._model: FollowedModel | None = None
        #: The copy that users keep until ``_model`` is complete; None if they use ``_model``.
        self._former: FollowedModel | None = None
        self._declared = b""
        self._threads: dict[int, threading.Thread] = {}
        self._trouble = ""
        #: Held by the thread that stops at a checkpoint.
        self._stopping = threading.Lock()
        self._is_stopping = False
        #: Pservers from which no changes are requested for now.
        self._stopped: set[int] = set()
        self._coordinator = JobCoordinator(open_coordinator(chosen, clock=self._clock), self._keys)
        self._consumer: ConsumerName | None = None
        if name is not None:
            try:
                self._consumer = ConsumerName(self._coordinator, self._clock, self._keys, name, chosen.lease_ttl_s)
            except BaseException:
                self._coordinator.close()
                raise
        self._directory = Directory(self._coordinator, self._keys, self._clock).start()
        self._servers = Servers(chosen.job, self._directory, connector)
        self._directory.subscribe(self._look)
        self._look()
        GUARD.register(self._servers)

    # users

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.model().array(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.model().arrays())

    def __len__(self) -> int:
        return len(self.model().arrays())

    def parameters(self) -> dict[str, npt.NDArray[Any]]:
        """Return all parameters as of one message, so that each pserver's values belong to a single state."""
        return self.model().arrays()

    @property
    def tables(self) -> dict[str, FollowedTable]:
        """The tables by name."""
        return {spec.name: FollowedTable(self, spec.name) for spec in self.model().plan.tables}

    @property
    def age_s(self) -> float:
        """Age of the copy, in seconds: the longest time since a pserver was last known to have no newer changes."""
        model, now = self.model(), self._clock.now()
        return max((now - model.fresh.get(server, 0.0) for server in range(model.plan.pserver_count)), default=0.0)

    def wait(self, timeout_s: float = 60.0) -> Self:
        """Wait until the copy is complete, and return the follower.

        Raises:
            DeadlineError: it is not complete in time; names the last error.
        """
        self._wait_for(lambda: self._model is not None and self._model.is_complete, timeout_s)
        return self

    def catch_up(self, timeout_s: float = 60.0) -> Self:
        """Wait until the copy has all changes that exist at this moment. Raises the same errors as ``wait``."""
        self.wait(timeout_s)
        begun = self._clock.now()
        self._wait_for(lambda: self.model().covers(begun), timeout_s)
        return self

    @contextlib.contextmanager
    def at_checkpoint(self, timeout_s: float = 60.0) -> Iterator[int]:
        """Stop at the next checkpoint: during the ``with`` block, the copy has exactly the checkpoint's state.

        Yields:
            The checkpoint's number. Its files may still be being written. If pservers come, leave or die meanwhile, the
            master may give this checkpoint up for a later one, so that there will be no files with this number.

        Raises:
            DeadlineError: no checkpoint was made in time; names the last error.
        """
        with self._stopping:
            self._is_stopping = True
            try:
                self._wait_for(lambda: self._stopped_at() is not None, timeout_s)
                number = self._stopped_at()
                assert number is not None, "the copy has changed"
                yield number
            finally:
                with self._changed:
                    self._is_stopping = False
                    self._changed.notify_all()

    def _stopped_at(self) -> int | None:
        model = self._model
        if model is None or not self._stopped.issuperset(range(model.plan.pserver_count)):
            return None
        return model.checkpoint

    def _wait_for(self, is_true: Any, timeout_s: float) -> None:
        GUARD.check()
        deadline = self._clock.now() + timeout_s
        with self._changed:
            while not is_true():
                left_s = deadline - self._clock.now()
                if left_s <= 0 or self._stop.is_set():
                    why = self._trouble or self._directory.trouble or "no trainer has declared the model yet"
                    raise DeadlineError(f"the model could not be followed for {timeout_s:g} s: {why}")
                self._changed.wait(min(left_s, _RETRY_S))

    def model(self) -> FollowedModel:
        """Return the current copy. Raises NotFoundError if the model is not known yet."""
        model = self._former or self._model
        if model is None:
            raise NotFoundError("the follower knows no model yet: call wait() first")
        return model

    def close(self) -> None:
        """Stop following. The copy remains readable."""
        if GUARD.is_forked:
            return
        GUARD.forget(self._servers)
        self._stop.set()
        self._directory.close()
        self._servers.abort_calls()
        for thread in list(self._threads.values()):
            thread.join()
        self._servers.close()
        if self._consumer is not None:
            self._consumer.close()
        self._coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the threads

    def _look(self) -> None:
        """Read the declaration, and start a thread for each pserver. Called by the directory after each change."""
        entry = self._directory.entry(self._keys.job)
        if entry is None or entry.value == self._declared or self._stop.is_set():
            return
        declared = decode(entry.value, JobDeclaration).model
        if declared is None:
            return
        plan = plan_of(declared)
        with self._lock:
            self._declared = entry.value
            if self._model is None or not self._model.plan.has_same_cut(plan):
                self._begin(FollowedModel(plan, 0 if self._model is None else self._model.life))
            else:
                self._model.plan = plan
            for server in range(plan.pserver_count):
                if server not in self._threads:
                    name = f"flightedl-follow-{server}"
                    thread = threading.Thread(target=self._follow, args=(server,), name=name, daemon=True)
                    self._threads[server] = thread
                    thread.start()

    def _begin(self, empty: FollowedModel) -> None:
        """Fill an empty copy. Users keep the present copy until the new one is complete. The caller holds the lock."""
        if self._model is not None and self._model.is_complete:
            self._former = self._model
        self._model = empty

    def _follow(self, server: int) -> None:
        while not self._stop.is_set():
            model = self._model
            assert model is not None, "threads begin with the first model"
            if server >= model.plan.pserver_count:
                self._stop.wait(_RETRY_S)
                continue
            self._stay(server, model)
            began = self._clock.now()
            try:
                _, connection = self._servers.pserver(server)
                has_changes = self._ask(server, model, connection)
                rest_s = _LEAST_REST_S
                if has_changes:
                    took_s = self._clock.now() - began
                    rest_s = min(max(_REST_FACTOR * took_s, _LEAST_REST_S), _MOST_REST_S)
            except FlightedlError as error:
                if not self._stop.is_set():
                    self._trouble, rest_s = str(error), _RETRY_S
                    _log.debug("pserver %d: %s", server, error)
            except Exception as error:
                self._trouble = f"a bug: {error}"
                _log.exception("the changes of pserver %d could not be applied", server)
                raise
            self._stop.wait(rest_s)

    def _stay(self, server: int, model: FollowedModel) -> None:
        """Wait while a pserver's part must stay at its checkpoint.

        If other parts do not reach this checkpoint, because it was given up or pservers were added or removed, all
        parts wait for the next one.
        """
        with self._changed:
            until = self._clock.now() + _STOPPED_S
            while self._is_stopping and model.waits(server) and not self._stop.is_set():
                if model.checkpoint is None and self._clock.now() > until:
                    break
                self._stopped.add(server)
                self._changed.notify_all()
                self._changed.wait(_RETRY_S)
            self._stopped.discard(server)

    def _ask(self, server: int, model: FollowedModel, connection: Connection) -> bool:
        """Request a pserver's changes and apply them. Return True if there were any."""
        since = model.since(server)
        asked = self._clock.now()
        is_stopping = self._is_stopping
        wait_s = _MARK_WAIT_S if is_stopping else _WAIT_S
        generation = None if self._consumer is None else self._consumer.generation
        ticket = ChangesTicket(
            plan_hash=model.plan.hash,
            since=since,
            marks=is_stopping,
            wait_s=wait_s,
            wire=self._wire,
            consumer="" if self._consumer is None or generation is None else self._consumer.name,
            consumer_generation=generation or 0,
        )
        with connection.get(encode(ticket), timeout_s=_ANSWER_S, schema=CHANGES_SCHEMA) as stream:
            header = decode((stream.schema.metadata or {}).get(HEADER_KEY, b""), ChangesHeader)
            received = model.begin(header, asked)
            for batch, _ in stream:
                if batch is not None:
                    received.add(decode_changes(batch))
        if not received.is_complete:
            raise MessageError("the end of a message of the feed is missing")
        use = model.apply(server, received)
        if use is Use.START_OVER:
            with self._lock:
                if model is self._model:
                    self._begin(FollowedModel(model.plan, header.position.life))
        if model is not self._model or use is Use.ASK_AGAIN:
            return False
        has_changes = header.position != since
        with self._changed:
            # Without changes, the copy was still up to date when the pserver answered.
            if header.checkpoint is None and use is Use.APPLY:
                model.fresh[server] = asked if has_changes else self._clock.now()
            if self._former is not None and model.is_complete:
                self._former = None
            self._trouble = ""
            self._changed.notify_all()
        return has_changes
