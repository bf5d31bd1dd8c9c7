"""Server processes that tests start, wait for, freeze and kill."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_POLL_S = 0.01
#: Ports below the range that Linux assigns to connections (``ip_local_port_range``).
_PICKED_PORTS = range(20_000, 32_000)
_FREEZE_TIMEOUT_S = 5.0


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` consecutive ports on 127.0.0.1 that were free a moment ago.

    The system never assigns these ports to connections, so another test's connection cannot occupy a port before the
    caller binds it. Only another caller of this function can do so.
    """
    while True:
        first = _PICKED_PORTS.start + secrets.randbelow(len(_PICKED_PORTS))
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Reserve a port on 127.0.0.1 that refuses connections until the context ends."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])


class ServerProcess:
    """A child process that leads its own process group and writes its output to a file."""

    def __init__(self, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                cwd=log_path.parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for the process. Return True once it is ready, or False if it exits first.

        Raises:
            TimeoutError: Neither happened in time. The message contains the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        while self.is_running:
            if is_ready():
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready within {timeout_s:g} s: {self.log()}")
            time.sleep(_POLL_S)
        return False

    def log(self) -> str:
        """Return the end of the process's output."""
        return self.log_path.read_text(errors="replace")[-2000:]

    def freeze(self) -> None:
        """Send SIGSTOP, and wait until every thread has stopped. The signal does not take effect immediately."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _FREEZE_TIMEOUT_S
        while self.is_running and not self._is_frozen():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not stop within {_FREEZE_TIMEOUT_S:g} s")
            time.sleep(_POLL_S / 10)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _is_frozen(self) -> bool:
        """True if all threads are stopped according to /proc. Without /proc, the signal is assumed to have worked."""
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[0] not in "TZX":
                    return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
