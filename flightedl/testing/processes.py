"""Server processes for tests: started, waited for, frozen, killed, and gone at the end."""

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
#: Below those that Linux gives on its own (``ip_local_port_range``).
_PICKED_PORTS = range(20_000, 32_000)
_FREEZE_TIMEOUT_S = 5.0


def free_port(count: int = 1) -> int:
    """A port of 127.0.0.1 that was free a moment ago, and likewise the next ones, ``count`` in all.

    It is none that the system gives to whoever asks for any, such as to each connection of other tests: one of those
    may be somebody's before its user has come to it. Only who picks ports as here may take it.
    """
    while True:
        first = _PICKED_PORTS.start + secrets.randbelow(len(_PICKED_PORTS))
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port on 127.0.0.1 that refuses connections, and that nobody else can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


class ServerProcess:
    """A child that leads a process group of its own and writes its output to a file."""

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
        """True when ready, False when the process ended first.

        Raises:
            TimeoutError: neither happened; carries the end of the log.
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
        """The end of its output."""
        return self.log_path.read_text(errors="replace")[-2000:]

    def freeze(self) -> None:
        """SIGSTOP, and wait until every thread stands still: the signal's arrival is not instantaneous."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + _FREEZE_TIMEOUT_S
        while self.is_running and not self._is_frozen():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not stop")
            time.sleep(_POLL_S / 10)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill -9, and wait for the end."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _is_frozen(self) -> bool:
        """By Linux's account; elsewhere the signal is trusted."""
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[0] not in "TZX":
                    return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
