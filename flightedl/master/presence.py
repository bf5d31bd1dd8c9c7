"""Ends the registrations of processes whose streams to the master have broken; see ``domain.master.presence``."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from functools import partial

from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.domain.master.presence import Presences, Process
from flightedl.errors import FlightedlError, MessageError, NotReadyError, UsageError
from flightedl.marks import sometimes
from flightedl.messages.control import PresenceRequest
from flightedl.ports import Clock, Coordinator, CreatedAt, Delete
from flightedl.process import machine
from flightedl.rpc.authentication import Role
from flightedl.rpc.call import Call

_log = logging.getLogger(__name__)

#: Maximum number of streams, each of which occupies a thread of the server.
_STREAMS_LIMIT = 512
#: Time left to a stream whose deadline has ended it.
_DEADLINE_S = 1.0
_RETRY_S = 0.2
#: Time for a dead pserver's machine to refuse a connection.
_REFUSAL_S = 0.2


class PresenceWatch:
    """Judges processes by their streams, in a thread of its own.

    A pserver is removed only if its port refuses connections, too. Its updates since the last checkpoint are lost with
    it, unless it has a standby.
    """

    def __init__(self, coordinator: Coordinator, directory: Directory, keys: JobKeys, clock: Clock) -> None:
        self._coordinator = coordinator
        self._directory = directory
        self._keys = keys
        self._clock = clock
        self._presences = Presences()
        self._changed = threading.Condition()
        self._is_closed = False
        #: Started with the first stream.
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def hear(self, request: PresenceRequest, call: Call) -> None:
        """Note the stream of this call as one of a process that holds a key.

        Raises:
            MessageError: this is not the key of a trainer or pserver that the caller may hold.
            NotReadyError: the process does not hold the key, as far as this master knows.
            UsageError: the job has no pservers, or other processes have too many streams already.
        """
        of_role = {Role.TRAINER: self._keys.trainer_id, Role.SERVER: self._keys.pserver_index}
        roles = [role for role, name_in in of_role.items() if name_in(request.key) is not None]
        if not roles or call.role not in {None, *roles}:
            raise MessageError("the key is not that of a trainer or pserver")
        if not self._directory.ps_desired():
            raise UsageError("without pservers, only the end of a lease shows that a process is dead")
        process = Process(request.key, request.generation)
        if not self._is_present(process):
            raise NotReadyError("another process holds the key, or none")
        with self._changed:
            if self._presences.stream_count >= _STREAMS_LIMIT:
                raise UsageError("too many processes have streams already: the others are judged by their leases alone")
            self._presences.opened(process, id(call), request.streams)
            call.ended = partial(self._ended, process, call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flightedl-presence", daemon=True)
                self._thread.start()

    def _ended(self, process: Process, call: Call) -> None:
        is_broken = call.remaining_s() > _DEADLINE_S and not call.closing.is_set()
        with self._changed:
            self._presences.ended(process, id(call), self._clock.now(), is_broken=is_broken)
            self._changed.notify_all()

    def _is_present(self, process: Process) -> bool:
        entry = self._directory.entry(process.key)
        return entry is not None and entry.create_revision == process.generation

    def _run(self) -> None:
        while True:
            with self._changed:
                now = self._clock.now()
                dead, next_at = self._presences.presumed_dead(now, self._is_present), self._presences.next_at()
                if self._is_closed:
                    return
                if not dead:
                    # If most processes have no streams, look again until they have, or until their leases have ended.
                    left_s = next_at - now if next_at > now else _RETRY_S
                    self._changed.wait(None if math.isinf(next_at) else left_s)
                    continue
            for process in dead:
                self._remove(process)

    def _remove(self, process: Process) -> None:
        """Delete the key of a process that is presumed dead, unless the key is gone or its port accepts connections."""
        index, trainer = self._keys.pserver_index(process.key), self._keys.trainer_id(process.key)
        record = None if index is None else self._directory.pservers().get(index)
        if self._is_present(process) and (record is None or machine.refuses(record.address, _REFUSAL_S)):
            sometimes("a process was presumed dead")
            who = f"trainer={trainer}" if index is None else f"index={index}"
            _log.warning("presumed dead, because its connections have closed: %s", who)
            self._delete_key(process)
        with self._changed:
            self._presences.forget(process)

    def _delete_key(self, process: Process) -> None:
        while self._is_present(process) and not self._is_closed:
            with contextlib.suppress(FlightedlError):
                self._coordinator.transact([CreatedAt(process.key, process.generation)], [Delete(process.key)])
                return
            self._clock.sleep(_RETRY_S)
