"""Child processes that cannot outlive their parent. Their output is captured line by line.

Every child leads its own process group and session. So Ctrl-C at the terminal reaches only the launcher, and killing a
child also kills the child's own children.

Children do not survive the launcher, however it dies, for two independent reasons. First, the kernel kills a child when
the *thread* that started it ends (``PR_SET_PDEATHSIG``); all children are started by one thread that lives as long as
the :class:`Children`. Second, the orphan reaper kills all groups on its list when its input ends.

A child's standard output and standard error are one stream. A thread reads it, writes it to the child's log file, and
passes it to ``on_lines``: a single line immediately, but lines in quick succession together, so that a verbose child
does not wait for the display. The last lines are kept for messages about the child's end.

Limitation: grandchildren that have their own session are not killed. The parent-death signal exists only on Linux; on
other systems, only the orphan reaper kills children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self

from flightedl.errors import EXIT_UNKNOWN, UsageError
from flightedl.launch import orphan_reaper
from flightedl.launch.forking import ForkedProcess
from flightedl.launch.orphan_reaper import kill_group

#: Called with the child's name and lines (without line ends) from the thread that reads them. Must not raise.
OnLines = Callable[[str, Sequence[str]], None]

_LINE_LIMIT_BYTES = 64 * 1024
_KEPT_LINES = 200
#: Minimum number of seconds between two calls of ``on_lines``. The pipe buffers the output in between.
_LINES_EVERY_S = 0.02
_POLL_S = 0.02

# Runs in the child before the child's program. Requests the parent-death signal; exits if the parent is already dead.
_PREPARE = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
except (AttributeError, OSError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A child process, running or ended. Created by :meth:`Children.start`. Thread-safe."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes] | ForkedProcess, log_path: Path, on_lines: OnLines | None
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        self._on_lines = on_lines
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"output-of-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code (minus the number of a signal), or None while the process runs.

        If the child has ended, the rest of its group is killed, and its output is read to the end.
        """
        with self._lock:
            if self._process.returncode is not None:
                return self._process.returncode
            # Check without reaping, so that the pid, which is the group's id, is not reused before the group is killed.
            try:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                # Another part of this program has reaped it. Popen would report the exit code 0.
                self._process.returncode = EXIT_UNKNOWN
                return EXIT_UNKNOWN
            if ended is None:
                return None
            kill_group(self.pid)
            code = self._process.wait()
        self._reader.join(timeout=2.0)
        return code

    @property
    def is_frozen(self) -> bool:
        """True if a signal has stopped the process and it has not been continued. Always False without ``/proc``."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        # The name of the process, in parentheses, may contain any characters. Its state follows.
        return stat.rpartition(")")[2].split()[0] == "T"

    def wait(self, timeout_s: float) -> int | None:
        """Poll for up to ``timeout_s`` seconds. Return the exit code, or None if the process is still running."""
        waiter = threading.Event()
        for _ in range(max(1, round(timeout_s / _POLL_S))):
            code = self.poll()
            if code is not None:
                return code
            waiter.wait(_POLL_S)
        return self.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, unless it has ended."""
        with self._lock:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the group."""
        with self._lock:
            if self._process.returncode is None:
                kill_group(self.pid)

    def tail(self, count: int = 40) -> tuple[str, ...]:
        """Return the last lines of the process's output."""
        return tuple(self._lines)[-count:]

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(stream)
            log: IO[bytes] | None = None
            with contextlib.suppress(OSError):
                log = stack.enter_context(self.log_path.open("ab", buffering=0))
            for lines in _lines(stream):
                if log is not None:
                    with contextlib.suppress(OSError):
                        log.write("".join(f"{line}\n" for line in lines).encode())
                self._lines.extend(lines)
                if self._on_lines is not None:
                    self._on_lines(self.name, lines)


def _lines(stream: IO[bytes]) -> Iterator[list[str]]:
    """Yield the lines of a stream as they arrive. Lines in quick succession are yielded together."""
    pause = threading.Event()
    begun = b""
    while raw := stream.read1(_LINE_LIMIT_BYTES):  # type: ignore[attr-defined] # every stream with a buffer has it
        *ended, begun = (begun + raw).split(b"\n")
        if len(begun) >= _LINE_LIMIT_BYTES:
            ended, begun = [*ended, begun[:_LINE_LIMIT_BYTES]], begun[_LINE_LIMIT_BYTES:]
        if ended:
            yield [_shown(line) for line in ended]
            pause.wait(_LINES_EVERY_S)
    if begun:
        yield [_shown(begun)]


def _shown(line: bytes) -> str:
    """Return a line's text without its end. If carriage returns redrew the line, return only its final state."""
    return line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]


class Children:
    """The child processes of one launcher. Thread-safe.

    Args:
        log_directory: Directory for the children's logs ``<name>.log``, which are appended to. Created if missing.
        on_lines: Receives the output of every child.
    """

    def __init__(self, log_directory: Path, on_lines: OnLines | None = None) -> None:
        self.log_directory = log_directory
        self._on_lines = on_lines
        self._running: dict[int, Child] = {}
        self._lock = threading.Lock()
        log_directory.mkdir(parents=True, exist_ok=True)
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="starts-children")
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", orphan_reaper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        directory: Path | None = None,
        on_lines: OnLines | None = None,
    ) -> Child:
        """Start a program.

        Args:
            name: Name of the log file, and prefix of the lines.
            command: Program (an absolute path) and its arguments.
            environment: All of its environment variables.
            directory: Its working directory; by default that of this process.
            on_lines: Receives its output, instead of the receiver passed to the constructor.

        Raises:
            UsageError: the program does not exist.
        """
        if not os.access(command[0], os.X_OK):
            raise UsageError(f"cannot run {command[0]}: there is no such program")
        prepared = [sys.executable, "-I", "-S", "-c", _PREPARE, str(os.getpid()), *command]
        process = self._starter.submit(
            subprocess.Popen,
            prepared,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PYTHONUNBUFFERED": "1", **environment},
            cwd=directory,
            start_new_session=True,
        ).result()
        return self.adopt(name, process, on_lines=on_lines)

    def adopt(
        self, name: str, process: subprocess.Popen[bytes] | ForkedProcess, *, on_lines: OnLines | None = None
    ) -> Child:
        """Adopt a child of this process that leads a process group and writes its output to a pipe. See ``start``."""
        self._instruct_reaper(f"group {process.pid}")
        child = Child(name, process, self.log_directory / f"{name}.log", on_lines or self._on_lines)
        with self._lock:
            self._running[process.pid] = child
        return child

    def forget(self, child: Child) -> None:
        """Remove a child that has ended from all lists."""
        if child.poll() is None:
            raise ValueError(f"{child.name} is still running")
        with self._lock:
            known = self._running.pop(child.pid, None)
        if known is not None:
            self._instruct_reaper(f"forget-group {child.pid}")

    def adopt_directory(self, directory: Path) -> None:
        """Arrange for a directory to be removed when the launcher ends for any reason."""
        self._instruct_reaper(f"directory {directory}")

    def remove_directory(self, directory: Path) -> None:
        """Remove an adopted directory now."""
        orphan_reaper.remove_directory(str(directory))
        self._instruct_reaper(f"forget-directory {directory}")

    def stop(self, children: Sequence[Child], grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Send SIGTERM to these children, then SIGKILL to those that outlive the grace period. Wait until all end.

        Args:
            children: The processes to end.
            grace_s: Time for them to end by themselves.
            is_hurried: Polled; the grace time ends when it returns True.
        """
        for child in children:
            child.send(signal.SIGTERM)
        waiter = threading.Event()
        for _ in range(max(1, round(grace_s / _POLL_S))):
            running = [child for child in children if child.poll() is None]
            if not running or is_hurried():
                break
            waiter.wait(_POLL_S)
        for child in children:
            child.kill()
        for child in children:
            child.wait(timeout_s=5.0)
            self.forget(child)

    def close(self) -> None:
        """Kill all running children, and end the orphan reaper, which removes the adopted directories."""
        with self._lock:
            left = list(self._running.values())
        self.stop(left, grace_s=0.0)
        stream = self._reaper.stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
        self._reaper.wait()
        self._starter.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _instruct_reaper(self, line: str) -> None:
        stream = self._reaper.stdin
        assert stream is not None
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            stream.write(line + "\n")
