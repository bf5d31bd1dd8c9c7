"""The master of a group that has no etcd. Rank 0 starts it, and the other ranks find it in the group's store.

The master is a child process of rank 0 (``launch.group_master``) that also serves a coordinator in its memory. Rank 0
publishes the master's address, together with a certificate that gives ranks access, so only processes that can read the
group's store can use the master. The pipe to the child tells the child when the process of rank 0 has ended.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import flightedl
from flightedl.client.data.ranks import rank_and_size
from flightedl.client.group_store import GroupStore, agent_store, group_store
from flightedl.client.waiting import Waiting
from flightedl.config import LOOPBACK, TrainerSettings, child_environment, family_of, is_loopback
from flightedl.coordination.coordinators import open_coordinator
from flightedl.coordination.flight_coordinator import FlightAccess
from flightedl.errors import AuthenticationError, FencedError, UnavailableError, UsageError
from flightedl.messages.base import Reply, decode, encode
from flightedl.messages.groups import GroupRecord
from flightedl.ports import Clock
from flightedl.rpc.authentication import Credentials

_READY_S = 120.0
#: Maximum seconds to wait for the master of the last start, which may still be writing its inheritance.
_INHERITED_S = 5.0
_LOOK_S = 0.1
#: Settings of the master, which are not those of rank 0. It has no etcd, and certificates of its own.
_SETTINGS = {
    **dict.fromkeys(("FLIGHTEDL_TLS_DIR", "FLIGHTEDL_ETCD_TLS_DIR", "FLIGHTEDL_ETCD_USER", "FLIGHTEDL_NOTICE"), ""),
    **dict.fromkeys(("FLIGHTEDL_PSERVERS", "FLIGHTEDL_METRICS_PORT", "FLIGHTEDL_HEALTH_PORT"), "0"),
    "FLIGHTEDL_ETCD": "none:1",
    "FLIGHTEDL_ETCD_PASSWORD_FILE": "",
    "FLIGHTEDL_INSECURE": "true",
}
#: Number of sessions that this process has opened. The ranks of a group open equally many.
_sessions = itertools.count(1)
#: The masters that this process has started. Their pipes remain open until this process ends.
_children: list[subprocess.Popen[bytes]] = []


class Published(Reply, frozen=True, kw_only=True):
    """Address of the group's master and the ranks' certificate, or the reason why the master has ended."""

    version: str = ""
    address: str = ""
    cluster: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    #: True if the master keeps the inheritance beside the dataset's index.
    has_index: bool = False
    reason: str = ""


class Inheritance(Reply, frozen=True, kw_only=True):
    """Records that are suspected or known to kill ranks, as the master of one start leaves them to the next."""

    #: Number of the start that has left it; 0 if none has.
    start: int = 0
    group: GroupRecord = GroupRecord()
    #: Prefix of its keys in the store of torchrun's agent; empty if there is none.
    key: str = ""


@dataclass(slots=True)
class OwnMaster:
    """The group's master, as one rank sees it."""

    access: FlightAccess
    #: Number of ranks.
    size: int
    cluster: str
    #: Key in the group's store, which is None in a group of one.
    key: str
    store: GroupStore | None
    #: The master's process; None on other ranks than rank 0.
    child: subprocess.Popen[bytes] | None
    #: True if this rank's session has ended cleanly.
    is_clean: bool = False
    _over: str = ""

    def over(self) -> str:
        """Return the reason why the master has ended; empty if this rank did not start it or it has not ended."""
        if not self._over and self.child is not None and self.child.poll() is not None:
            self._over = f"the group's master, process {self.child.pid}, has ended: {_reason(self.child)}"
        return self._over

    def require_current(self) -> None:
        """Raise FencedError if rank 0 has published another master since this rank has found this one."""
        text = None if self.store is None else self.store.get(self.key)
        if text is not None and decode(text.encode(), Published).cluster != self.cluster:
            raise FencedError("rank 0 was started again after this rank had found its master: start this rank again")

    def close(self) -> None:
        if self.child is not None and self.child.stdin is not None:
            with suppress(OSError):
                if self.is_clean:
                    # The pipe stays open until this process ends.
                    self.child.stdin.write(b"clean\n")
                    self.child.stdin.flush()
                else:
                    self.child.stdin.close()


def key_of_start(job: str) -> str:
    """Return the key in the group's store at which rank 0 of a job with etcd publishes the name of its start."""
    return f"flightedl/{job}/start"


def key_of_master(job: str, session: int) -> str:
    """Return the key in the group's store at which rank 0 publishes the master of one of its sessions."""
    return f"flightedl/{job}/master/{session}"


@contextmanager
def own_master(chosen: TrainerSettings, clock: Clock) -> Iterator[OwnMaster]:
    """Start or find the master of the group to which this process belongs.

    Raises:
        UsageError: the master cannot be started, or the ranks contradict each other.
        UnavailableError: the group's store or the master cannot be reached.
    """
    rank, size = rank_and_size("auto", chosen.process_name)
    store = group_store() if size > 1 else None
    if size > 1 and store is None:
        raise UsageError(
            f"this is rank {rank} of {size}, but these ranks have no store to find each other: call "
            "torch.distributed.init_process_group before fe.connect(), use torchrun, or set FLIGHTEDL_ETCD"
        )
    key = key_of_master(chosen.job, next(_sessions))
    child = None
    if rank:
        assert store is not None, "a group of one has only rank 0"
        found = _found(chosen, store, key, clock)
    else:
        child, found = _started(chosen, store, key, clock)
        if store is not None:
            store.put(key, encode(found).decode())
    with closing(OwnMaster(_access(chosen.job, found), size, found.cluster, key, store, child)) as own:
        yield own


def _started(
    chosen: TrainerSettings, store: GroupStore | None, key: str, clock: Clock
) -> tuple[subprocess.Popen[bytes], Published]:
    agent = agent_store(key)
    inherited = Inheritance() if agent is None else _inherited(agent, key, clock)
    bind, advertise = _interface("" if store is None else store.host)
    child = subprocess.Popen(
        [sys.executable, "-m", "flightedl.launch.group_master"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            "FLIGHTEDL_LOG_LEVEL": "WARNING",
            "FLIGHTEDL_BIND": bind,
            "FLIGHTEDL_ADVERTISE": advertise,
            **child_environment(**_SETTINGS, FLIGHTEDL_JOB=chosen.job),
        },
        # Signals to the processes of rank 0 must not end it: it may have to outlive them.
        start_new_session=True,
    )
    _children.append(child)
    assert child.stdout is not None
    assert child.stdin is not None
    with suppress(OSError):
        child.stdin.write(encode(inherited) + b"\n")
        child.stdin.flush()
    found = Published()
    if select.select([child.stdout], [], [], _READY_S)[0] and (line := child.stdout.readline()):
        found = decode(line, Published)
    if not found.address:
        child.kill()
        reason = _reason(child)
        raise UsageError(f"the group's master could not be started: {found.reason or reason}")
    sys.stderr.write(f"flightedl: started the group's master, process {child.pid}, at {found.address}\n")
    if agent is None and not found.has_index:
        sys.stderr.write(
            "flightedl: a record that kills its rank in every start cannot be found, because nothing outlives a start: "
            "use torchrun, or set FLIGHTEDL_CHECKPOINT\n"
        )
    return child, found


def _inherited(agent: GroupStore, key: str, clock: Clock) -> Inheritance:
    """Return what the last start has left in the store of torchrun's agent, and count this start."""
    last, deadline = int(agent.get("starts") or 0), clock.now() + _INHERITED_S
    while True:
        found = decode((agent.get("inheritance") or "{}").encode(), Inheritance)
        if found.start == last or clock.now() > deadline:
            agent.put("starts", str(last + 1))
            return Inheritance(start=last + 1, group=found.group, key=key)
        clock.sleep(_LOOK_S)


def _reason(child: subprocess.Popen[bytes]) -> str:
    text, code = child.communicate()[0], child.returncode
    if text:
        return decode(text, Published).reason
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"


def _interface(host: str) -> tuple[str, str]:
    """Return the address to which the master binds, and the one that ranks use, given the name of rank 0's host."""
    names = os.environ  # noqa: TID251 - launchers set them
    if not host or names.get("LOCAL_WORLD_SIZE", "") == names.get("WORLD_SIZE"):
        return LOOPBACK, LOOPBACK
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UsageError(
            f"the host of rank 0 (MASTER_ADDR), {host!r:.80}, cannot be resolved: {error.strerror}"
        ) from None
    with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        if not is_loopback(address):
            return address, host
    # The name belongs to a gateway or, on this machine, to loopback. Certificates protect the other interfaces.
    return ("::" if ":" in address else "0.0.0.0"), host  # noqa: S104 - see above


def _found(chosen: TrainerSettings, store: GroupStore, key: str, clock: Clock) -> Published:
    waiting = Waiting(clock, chosen.say_after_s, chosen.give_up_s, lambda _: None)
    while True:
        reason = "rank 0 to start the group's master"
        if (text := store.get(key)) is not None:
            found = decode(text.encode(), Published)
            if found.version != flightedl.__version__:
                raise UsageError(
                    f"rank 0 runs flightedl {found.version}, but this rank {flightedl.__version__}: install the same "
                    "version on all machines"
                )
            try:
                with closing(open_coordinator(_access(chosen.job, found), clock=clock)) as coordinator:
                    coordinator.get(key)
            except (UnavailableError, AuthenticationError) as error:
                # It may be the address of an earlier start.
                reason = str(error)
            else:
                return found
        elif store.get(key_of_start(chosen.job)) is not None:
            raise UsageError(
                "FLIGHTEDL_ETCD is set for rank 0, but not for this rank: set it for all ranks, or for none"
            )
        waiting.because(reason)
        waiting.pause()


def _access(job: str, found: Published) -> FlightAccess:
    credentials = Credentials(found.ca.encode(), found.cert.encode(), found.key.encode())
    return FlightAccess(found.address, job, credentials)
