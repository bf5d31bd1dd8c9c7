"""Client of ``fork_server``: starts processes without delay, as their modules are already imported.

Works only on Linux. On other systems, or if anything fails, the caller gets None and starts the process as a program.
The fork server lives as long as the job, so a killed process is replaced within milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from flightedl.config import available_cores, child_environment, thread_environment
from flightedl.errors import EXIT_UNKNOWN
from flightedl.launch.fork_server import NUMBER_BYTES, PADDING, Request
from flightedl.launch.preloading import modules_of

_PR_SET_CHILD_SUBREAPER = 36
#: Imports may take a long time on a busy machine, but would take just as long in a process started as a program.
_FIRST_ANSWER_S = 120.0
#: Timeout in seconds for kinds of processes forked before: the delay if the fork server is frozen.
_ANSWER_S = 10.0
#: Prefixes of variables that the interpreter and libraries read only when they load. A process that needs other values
#: for these variables cannot be forked, and is started as a program.
_READ_AT_LOAD = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "GRPC_", "ARROW_", "NUMBA_", "LC_", "LANG")

#: Being a subreaper is a property of the whole process, which may have several fork servers.
_adopting = threading.Lock()


class ForkedProcess:
    """A child of the fork server, with the parts of ``subprocess.Popen`` that launchers use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        #: Read end of the pipe for the child's output; None if the output goes elsewhere.
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None

    def wait(self) -> int:
        """Return the exit code, or minus the number of the signal, like ``subprocess.Popen.wait``."""
        if self.returncode is None:
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                # Another part of this program has already waited for the child.
                self.returncode = EXIT_UNKNOWN
        return self.returncode


class ForkServer:
    """A process from which other processes are forked. Use it in a ``with`` block. Thread-safe.

    Args:
        environment: Its variables; libraries read some of them when they are loaded.
        kinds: Kinds of processes that will be requested, in order. Their modules are imported in advance, and so are
            modules whose names follow a "+", before which nothing is forked.
        apart: Kinds of processes for which a second fork server imports concurrently.
    """

    def __init__(self, environment: Mapping[str, str], kinds: Sequence[str] = (), apart: Sequence[str] = ()) -> None:
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = not any(kind.startswith("+") for kind in kinds)
        self._prefixes = _READ_AT_LOAD if self._is_ready else (*_READ_AT_LOAD, "OMP_", "MKL_", "CUDA_", "TORCH_")
        self._environment, self._read_at_load = dict(environment), _read_at_load(environment, self._prefixes)
        #: Fork server that has imported what the target of the trainers imports, and this target.
        self._preloaded: ForkServer | None = None
        self._target = ""
        #: Kinds of processes that the fork server has forked so far.
        self._made: set[str] = set()
        self._second = ForkServer(environment, apart) if apart else None
        self._apart = tuple(apart)
        if sys.platform.startswith("linux"):
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "flightedl.launch.fork_server", *kinds, PADDING],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={"PYTHONUNBUFFERED": "1", **environment},
                    start_new_session=True,
                )

    def start(
        self, kind: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> ForkedProcess | None:
        """Fork a process that runs ``python -m module arguments``. Return None if it must be started as a program.

        Args:
            kind: "master", "pserver" or "trainer"; decides what is imported in advance.
            module: The module to run.
            arguments: The module's arguments.
            environment: All of its environment variables.
        """
        reading, writing = os.pipe()
        try:
            process = self.start_into(writing, kind, module, arguments, environment)
        finally:
            os.close(writing)
        if process is None:
            os.close(reading)
        else:
            process.stdout = os.fdopen(reading, "rb")
        return process

    def start_into(
        self,
        output: int,
        kind: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: str = "",
    ) -> ForkedProcess | None:
        """Fork a process as ``start`` does, with this output descriptor and working directory."""
        if self._preloaded is not None and kind == "trainer":
            forked = self._preloaded.start_into(output, kind, module, arguments, environment, directory)
            if forked is not None:
                return forked
        if not self._is_ready and self._socket is not None and _is_readable(self._socket):
            self._is_ready = self._socket.recv(1) == b"+"
        if _read_at_load(environment, self._prefixes) != self._read_at_load or not self._is_ready:
            return None
        if self._second is not None and kind in self._apart:
            return self._second.start_into(output, kind, module, arguments, environment, directory)
        own = {"PYTHONUNBUFFERED": "1", **environment}
        request = Request(kind, module, list(arguments), own, directory or _directory(), os.getpid())
        with self._lock:
            if self._socket is None:
                return None
            self._socket.settimeout(_ANSWER_S if kind in self._made else _FIRST_ANSWER_S)
            if pid := _adopted(self._socket, json.dumps(request).encode(), output):
                self._made.add(kind)
                return ForkedProcess(pid)
            self.close()
            return None

    def preload(self, target: str) -> None:
        """Fork later trainers from a process that has imported what their script imports, as soon as it has."""
        if target != self._target:
            if self._preloaded is not None:
                self._preloaded.close()
            kinds = ("trainer", *(f"+{name}" for name in modules_of(target)))
            self._target, self._preloaded = target, ForkServer(self._environment, kinds) if len(kinds) > 1 else None

    def close(self) -> None:
        """End all fork servers."""
        with self._lock:
            self.preload("")
            if self._second is not None:
                self._second.close()
            if self._socket is not None:
                self._socket.close()
            if self._process is not None:
                os.kill(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._socket = self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fork_server(trainers: int) -> ForkServer:
    """Start a fork server for a job with this many trainers, each of which gets its share of the cores."""
    cores = available_cores()
    kinds = ("master", *(("trainer",) if trainers else ()))
    # Importing the pservers' compiler takes as long as all other imports together.
    others = ("pserver",)
    environment = child_environment(**thread_environment(trainers or 1, cores))
    return ForkServer(environment, kinds, others) if cores > 1 else ForkServer(environment, (*kinds, *others))


def _is_readable(connection: socket.socket) -> bool:
    """True if a read would not wait. ``select`` refuses descriptors beyond 1023, which a user's process may have."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _read_at_load(environment: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    found.pop("PYTHONUNBUFFERED", None)
    return found


def _directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _adopted(connection: socket.socket, body: bytes, output: int) -> int:
    """Return the pid of the child that the fork server created for this process, or 0 if it could not be forked."""
    with _adopting:
        if not _adopt(wanted=True):
            return 0
        try:
            socket.send_fds(connection, [len(body).to_bytes(NUMBER_BYTES, "little")], [output])
            connection.sendall(body)
            pid = int.from_bytes(connection.recv(NUMBER_BYTES), "little")
        except OSError:
            return 0
        finally:
            _adopt(wanted=False)
    return pid if pid and _is_own(pid) else 0


def _adopt(*, wanted: bool) -> bool:
    """Turn the adoption of orphaned descendants on or off. False if the system does not support it."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False


def _is_own(pid: int) -> bool:
    """True if the process, running or ended, is a child of this process. If it is not, kill it."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    return False
