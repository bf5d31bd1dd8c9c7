"""``flightedl run`` for tests, forked from a process that has already imported its modules.

The imports of a launcher dominate the cost of a test that starts a job. Here one fork server imports modules for all
tests of a process, and forks the launchers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from flightedl.config import available_cores, child_environment, thread_environment, tuned_environment
from flightedl.launch.forking import ForkedProcess, ForkServer

#: Modules that a fork server of launchers imports. The last one is the package that contains this module.
KINDS = ("master", "trainer", "pserver", "rich.console", "flightedl.launch.run", "tests.launch")
_THIS = "tests.launch.forked_launcher"
_TRAINERS = 2
_POLL_S = 0.01
_END_S = 300.0


@contextlib.contextmanager
def shared_fork_server() -> Iterator[ForkServer]:
    """Run a fork server for the processes of many tests and clusters."""
    environment = child_environment(**thread_environment(_TRAINERS, available_cores()))
    with ForkServer(environment, KINDS) as forks:
        for kind in KINDS:
            # The server accepts requests before it has imported everything; launchers forked then would import again.
            import_first(forks, kind)
        yield forks


def import_first(forks: ForkServer, kind: str) -> None:
    """Import the modules of a kind of process, or one module, before any further fork."""
    with Path(os.devnull).open("wb") as nowhere:
        environment = child_environment(**thread_environment(_TRAINERS, available_cores()))
        if (process := forks.start_into(nowhere.fileno(), kind, "keyword", (), environment)) is not None:
            process.wait()


class ForkedCommand:
    """``python -m flightedl ...``, with the part of ``subprocess.Popen`` that tests use.

    Args:
        forks: Server from ``shared_fork_server``; None starts a program.
        arguments: Arguments of the command.
        cwd: Working directory.
        stdout: File that receives all output.
        env: The complete environment.
    """

    def __init__(
        self,
        forks: ForkServer | None,
        arguments: Sequence[str],
        *,
        cwd: Path,
        stdout: IO[bytes],
        env: Mapping[str, str],
    ) -> None:
        own = {**tuned_environment(), **env}
        process: ForkedProcess | subprocess.Popen[bytes] | None = None
        if forks is not None:
            process = forks.start_into(stdout.fileno(), KINDS[-1], _THIS, arguments, own, str(cwd))
        if process is None:
            command = [sys.executable, "-m", "flightedl", *arguments]
            process = subprocess.Popen(command, cwd=cwd, stdout=stdout, stderr=subprocess.STDOUT, env=own)
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while the command is running."""
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._process.wait()
        return self._process.returncode

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait(self, timeout: float = _END_S) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: The command did not end in time.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("flightedl", timeout)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.poll() is None:
            self._process.wait()


def main() -> None:
    """Run the command with the received arguments."""
    from flightedl_tools import main as command
    from flightedl_tools import run

    run.fork_server = lambda _trainers: ForkServer(os.environ)
    sys.argv[0] = "flightedl"
    command.main()


if __name__ == "__main__":
    main()
