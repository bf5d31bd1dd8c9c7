"""``python -m flightedl.launch.group_master``: the master of a group without etcd, started by rank 0.

It keeps the coordinator's state in its memory, and serves it together with the master's verbs. Access requires a
certificate, which this process creates and writes to its parent, rank 0 (``client.own_master``).

It ends as soon as rank 0 has ended, unless rank 0's session has ended cleanly. It then remains until all ranks have
left their sessions, for at most 30 s after the end of rank 0: if it ended earlier, the other ranks would fail, and the
launcher would repeat a training that is complete.
"""

from __future__ import annotations

import os
import select
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flightedl.process.ending import end_at_once
from flightedl.process.importing import of_a_server
from flightedl.process.tuning import leave_out_pandas_and_scipy

if __name__ == "__main__":
    # Must be called before importing packages that use arrays.
    leave_out_pandas_and_scipy()

with of_a_server():
    from msgspec.structs import replace as replace_fields

    import flightedl
    from flightedl.adapters import certificates
    from flightedl.adapters.memory import MemoryCoordinator, MemoryStore
    from flightedl.adapters.pem_files import FILES
    from flightedl.adapters.storage import open_storage
    from flightedl.client.group_store import agent_store
    from flightedl.client.own_master import Inheritance, Published
    from flightedl.config import MasterSettings, host_port, settings
    from flightedl.coordination.flight_coordinator import coordinator_actions
    from flightedl.coordination.keeper import HeldKey
    from flightedl.errors import FlightedlError, NotFoundError, exit_code_of
    from flightedl.launch.certificates import members
    from flightedl.master.main import MasterProcess
    from flightedl.messages.base import decode, encode
    from flightedl.ports import Put
    from flightedl.process import log_format, machine
    from flightedl.rpc.authentication import Credentials, Role
    from flightedl.rpc.routes import Routes
    from flightedl.rpc.server import FlightServer

_FAREWELL_S = 30.0
_LAST_REPORTS_S = 0.5
_LOOK_S = 0.25
_VALID_DAYS = 3650


class GroupMaster(MasterProcess):
    """A master with a coordinator in its memory. Its parent is rank 0."""

    def __init__(self, chosen: MasterSettings, inherited: Inheritance) -> None:
        super().__init__(chosen)
        self._store = MemoryStore(self._clock)
        self._index = open_storage(chosen.checkpoint) if chosen.checkpoint else None
        self._file = f"{chosen.job}/group.json"
        self._inherited = inherited
        if self._index is not None:
            with suppress(NotFoundError):
                self._inherited = decode(self._index.read(self._file), Inheritance)
        self._open_coordinator().transact([], [Put(self._keys.group, encode(self._inherited.group))])
        self._certificates = _certificates(chosen.job)
        self._parent = os.getppid()

    @property
    def reason(self) -> str:
        return self._reason

    def _open_coordinator(self) -> MemoryCoordinator:
        return MemoryCoordinator(self._clock, self._store)

    def _load_credentials(self) -> Credentials:
        return self._certificates[Role.SERVER]

    def _server(self, routes: Routes) -> FlightServer:
        actions = coordinator_actions(self._open_coordinator())
        roles = dict.fromkeys(actions, (Role.TRAINER,))
        return super()._server(replace(routes, actions={**routes.actions, **actions}, roles={**routes.roles, **roles}))

    def _publish(self, held: HeldKey, port: int) -> None:
        super()._publish(held, port)
        own = self._certificates[Role.TRAINER]
        _write(
            Published(
                version=flightedl.__version__,
                address=host_port(self._settings.advertise, port),
                cluster=self._store.cluster,
                ca=own.ca.decode(),
                cert=own.cert.decode(),
                key=own.key.decode(),
                has_index=self._index is not None,
            )
        )
        threading.Thread(target=self._follow_rank_0, name="flightedl-rank-0", daemon=True).start()

    def _follow_rank_0(self) -> None:
        is_clean = False
        while not self._stop.is_set():
            if is_clean and not self._has_ranks():
                break
            if select.select([0], [], [], _LOOK_S)[0]:
                if not os.read(0, 64):
                    break
                is_clean = True
            if os.getppid() != self._parent:
                # A process that rank 0 has forked may keep the pipe open.
                break
        ended_at = self._clock.now()
        while is_clean and self._has_ranks() and self._clock.now() - ended_at < _FAREWELL_S:
            self._stop.wait(_LOOK_S)
        with suppress(FlightedlError):
            self._bequeath(is_clean=is_clean)
        self.end(0, "its ranks have ended")

    def _bequeath(self, *, is_clean: bool) -> None:
        """Leave the records that may have ended this start to the master of the next start."""
        if is_clean:
            if self._index is not None:
                self._index.delete(self._file)
            return
        # Ranks that live longer than the first dead one have reported their rounds by then.
        self._stop.wait(_LAST_REPORTS_S)
        left = encode(replace_fields(self._inherited, group=self._service.inheritance()))
        if self._index is not None:
            self._index.publish(self._file, [left])
        elif self._inherited.key and (agent := agent_store(self._inherited.key)) is not None:
            agent.put("inheritance", left.decode())

    def _has_ranks(self) -> bool:
        return bool(self._open_coordinator().list(self._keys.trainers).entries)


def _certificates(job: str) -> dict[Role, Credentials]:
    """Return certificates of a new authority, which exist only in the memory of the group's processes."""
    roles = (Role.SERVER, Role.TRAINER)
    with tempfile.TemporaryDirectory() as name:
        needed = [member for member in members(job, ()) if member.name in roles]
        certificates.create(Path(name), needed, days=_VALID_DAYS, authority_days=_VALID_DAYS + 1)
        files = {role: [(Path(name) / role / file).read_bytes() for file in FILES] for role in roles}
        return {role: Credentials(ca, cert, key) for role, (ca, cert, key) in files.items()}


def _write(message: Published) -> None:
    with suppress(OSError):
        sys.stdout.buffer.write(encode(message) + b"\n")
        sys.stdout.buffer.flush()


def main() -> int:
    """Run the master. Write its address to the standard output, and finally the reason for its end."""
    machine.tune_server()
    try:
        chosen = settings(MasterSettings)
        log_format.set_up(chosen.log_level, chosen.log_format)
        master = GroupMaster(chosen, decode(sys.stdin.buffer.readline(), Inheritance))
        code, reason = master.run(), master.reason
    except FlightedlError as error:
        code, reason = exit_code_of(error), str(error)
    _write(Published(reason=reason))
    return code


if __name__ == "__main__":
    end_at_once(main())
