"""An etcd for one job: a single member on this machine that runs as long as the job.

Rules:

* etcd listens only on the loopback interface, on ports that were free a moment earlier (it does not support port 0). If
  another process takes one of these ports first, other ports are tried.
* etcd's data is in a temporary directory, which :meth:`EmbeddedEtcd.close` removes. If etcd's *process* is killed,
  :meth:`EmbeddedEtcd.start_again` restarts it with the same data and ports. If the launcher and its reaper are killed,
  the next job on this machine removes the directory, whose lock nobody holds any more.
* etcd does not sync to disk (``--unsafe-no-fsync``). This is acceptable for data that is not needed after the job, but
  not for the etcd of a cluster. Old revisions are compacted, and the log is truncated often, so that jobs with millions
  of tasks stay small.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Self

from flightedl.adapters.etcd_program import find_etcd, member_arguments
from flightedl.config import LOOPBACK, child_environment, host_port
from flightedl.domain.etcd_versions import is_sound
from flightedl.errors import UnavailableError
from flightedl.launch.places import free_ports
from flightedl.launch.policy import describe_exit
from flightedl.launch.processes import Child, Children

_PREFIX, _LOCK = "flightedl-etcd-", "launcher.lock"
_PORT_ATTEMPTS = 5
_READY_S = 60.0
_READY_POLL_S = 0.02


class EmbeddedEtcd:
    """One etcd process and its temporary data directory.

    Args:
        children: Starts the process and reaps it.
        program: The etcd program; by default the one that :func:`find_etcd` finds.
    """

    def __init__(self, children: Children, program: str | None = None) -> None:
        self._children = children
        self._program, version = (program, ()) if program else find_etcd()
        #: A warning to users about the etcd program; empty if there is none.
        self.warning = ""
        if version and not is_sound(version):
            self.warning = (
                f"etcd {'.'.join(map(str, version))} ({self._program}) may lose acknowledged writes when etcd itself "
                "is killed, and batches then count twice or not at all. Kills of all other processes are safe. "
                "Install etcd 3.4.23, 3.5.3 or newer, for example by `apt-get install etcd-server`"
            )
        sweep()
        self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        children.adopt_directory(self._directory)
        new = self._directory / "new.lock"
        self._lock = new.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Only now, because another launcher deletes the directory if it finds the lock free.
        new.rename(self._directory / _LOCK)
        self._ports: tuple[int, int] | None = None
        self._child: Child | None = None

    @property
    def address(self) -> str:
        """``host:port`` for clients. Valid once etcd has started."""
        if self._ports is None:
            raise ValueError("etcd was not started")
        return host_port(LOOPBACK, self._ports[0])

    @property
    def child(self) -> Child:
        if self._child is None:
            raise ValueError("etcd was not started")
        return self._child

    def start(self) -> Child:
        """Start etcd and wait until it answers.

        Raises:
            UnavailableError: it does not start; contains its last line of output.
        """
        reason = ""
        for _attempt in range(_PORT_ATTEMPTS):
            client, peer = free_ports(2)
            ports = client, peer
            child = self._children.start("etcd", self._command(ports), child_environment())
            failure = _wait_until_healthy(child, ports[0], self._directory.name)
            if failure is None:
                self._ports, self._child = ports, child
                return child
            reason = failure
            self._children.stop([child], grace_s=0.0)
            if "address already in use" not in reason:
                break
        raise UnavailableError(f"etcd ({self._program}) does not start: {reason}")

    def start_again(self) -> Child:
        """Restart etcd, whose process has ended, with the same address and data.

        Does not wait for an answer, because etcd may be killed before it answers, or be slow on a busy machine. The
        supervisor watches the process, and all clients retry.

        Raises:
            UnavailableError: the previous process cannot be killed.
        """
        before, ports = self.child, self._ports
        assert ports is not None, "it was started before"
        before.kill()
        if before.wait(timeout_s=5.0) is None:
            raise UnavailableError(f"the previous etcd (pid {before.pid}) cannot be killed")
        self._children.forget(before)
        self._child = self._children.start("etcd", self._command(ports), child_environment())
        return self._child

    def close(self) -> None:
        """Stop etcd and delete its data."""
        if self._child is not None:
            self._children.stop([self._child], grace_s=0.5)
        self._children.remove_directory(self._directory)
        self._lock.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, ports: tuple[int, int]) -> list[str]:
        client, peer = (f"http://{host_port(LOOPBACK, port)}" for port in ports)
        name = self._directory.name
        return [
            self._program,
            *member_arguments(name, f"{self._directory}/data", client, peer, f"{name}={peer}"),
            "--heartbeat-interval=10",
            "--election-timeout=50",
            "--unsafe-no-fsync",
            "--snapshot-count=5000",
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=10000",
            f"--quota-backend-bytes={8 << 30}",
            "--logger=zap",
            "--log-level=warn",
            "--log-outputs=stderr",
        ]


def sweep() -> None:
    """Delete the data of killed jobs: directories whose lock nobody holds."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (directory / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)


def _wait_until_healthy(child: Child, port: int, member: str) -> str | None:
    waiter = threading.Event()
    for _ in range(round(_READY_S / _READY_POLL_S)):
        code = child.poll()
        if code is not None:
            return f"{describe_exit(code)}; it said: {' '.join(child.tail(3)) or 'nothing'}"
        if _is_healthy(port, member):
            return None
        waiter.wait(_READY_POLL_S)
    return f"no answer within {_READY_S:.0f} s"


def _is_healthy(port: int, member: str) -> bool:
    """True if this etcd (not another one that has taken its port) answers and has a leader."""
    # Imported while etcd starts.
    import http.client

    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        healthy = b'"true"' in connection.getresponse().read()
        connection.request("POST", "/v3/cluster/member/list", body=b"{}")
        return healthy and member.encode() in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
