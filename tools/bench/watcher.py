"""Looks at a running job from outside, for benches that disturb it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from flightedl.errors import FlightedlError
from flightedl.launch.cluster import LocalCluster
from flightedl.launch.status import JobStatus
from flightedl.launch.supervisor import explain
from flightedl.messages.base import decode
from flightedl.messages.status import PserverStatusReply, StatusReply
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity

_T = TypeVar("_T")

_POLL_S = 0.01
_PATIENCE_S = 90.0
_STANDBY_STARTS_S = 3.0


class Watcher:
    """Looks at a running job from outside."""

    def __init__(self, cluster: LocalCluster, status: JobStatus) -> None:
        self._cluster = cluster
        self._job = cluster.job
        self._status = status
        self._connections: dict[tuple[int, int], Connection] = {}

    def job(self, timeout_s: float = 1.0) -> StatusReply | None:
        """None: the master does not answer."""
        try:
            return self._status.read(timeout_s)
        except FlightedlError:
            return None

    def accepted(self) -> dict[int, tuple[int, int]]:
        """Index -> (generation, rows accepted) of the pservers that answer."""
        job = self.job()
        return {} if job is None else self.accepted_at({p.index: (p.address, p.generation) for p in job.pservers})

    def accepted_at(self, places: dict[int, tuple[str, int]]) -> dict[int, tuple[int, int]]:
        """The same, asked of the pservers directly."""
        found: dict[int, tuple[int, int]] = {}
        for index, (address, generation) in places.items():
            key = (index, generation)
            if key not in self._connections:
                identity = ServerIdentity(self._job, "pserver", index, generation)
                self._connections[key] = Connection(address, expected=identity, caller=Caller("tool", "bench"))
            try:
                reply = decode(self._connections[key].action("status", b"", timeout_s=0.5), PserverStatusReply)
            except FlightedlError:
                continue
            if reply.state == "serving":
                found[index] = (generation, reply.rows["accepted"])
        return found

    def places(self) -> dict[int, tuple[str, int]]:
        """Index -> (address, generation) of all pservers."""
        job = self.until(self.job, "the master")
        return {p.index: (p.address, p.generation) for p in job.pservers}

    def pid_of_pserver(self, index: int) -> int:
        """The process that holds an index."""

        def found() -> int | None:
            job = self.job()
            return None if job is None else next((p.pid for p in job.pservers if p.index == index), None)

        return self.until(found, f"pserver {index}")

    def until(self, look: Callable[[], _T | None], what: str) -> _T:
        """The first answer that is not None.

        Raises:
            TimeoutError: there is none in time.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while (found := look()) is None:
            if (outcome := self._cluster.outcome()) is not None:
                raise TimeoutError(f"the job ended while it was watched: {explain(outcome)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
        return found

    def settle(self) -> None:
        """Return when everybody works, and whoever stands by has had time to start."""
        time.sleep(_STANDBY_STARTS_S)

        def works() -> bool | None:
            before = self.accepted()
            time.sleep(0.3)
            after = self.accepted()
            return (
                True if len(after) == 2 and all(after[i][1] > before.get(i, (0, 1 << 60))[1] for i in after) else None
            )

        self.until(works, "job that works")

    def close(self) -> None:
        """End all connections."""
        for connection in self._connections.values():
            connection.close()
