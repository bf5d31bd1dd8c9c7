"""Apply the user's transform to several batches in parallel, and deliver the results in order.

Each reader process is served by a thread in this process. The thread keeps two batches in flight, so the reader process
never waits for its next batch. If a reader is killed, it is restarted with the same batches. A batch that kills three
readers in a row is reported as an error.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import pyarrow as pa

from flightedl.client.data import transforms
from flightedl.client.data.transforms import NamedFunction, Transform, UnusableTransformError
from flightedl.config import child_environment, thread_environment
from flightedl.domain.retries import machine_error
from flightedl.errors import ExhaustedError, FlightedlError, UsageError
from flightedl.process.shared_memory import host_mark

#: Maximum number of undelivered batches for each reader process.
_WAITING = 4
_DEATHS_LIMIT = 3
_CLOSE_S = 2.0

#: A transformed batch, the error that its transform raised, or None for an item without a batch.
Result: TypeAlias = pa.RecordBatch | Exception | None


@dataclass(slots=True, eq=False)
class _Job:
    batch: pa.RecordBatch | None
    place: Callable[[], str]
    deliver: Callable[[Result], object]
    result: Result = None
    is_done: bool = False
    deaths: int = 0


class Transforming:
    """Applies a transform to batches. Only one thread may call ``put``.

    Args:
        transform: The function; None to deliver batches unchanged.
        readers: Number of processes; 0 transforms in the thread that calls ``put``.

    Raises:
        UsageError: the reader processes cannot find the transform.
    """

    def __init__(self, transform: Transform | None = None, readers: int = 0) -> None:
        if readers and transform is None:
            raise UsageError("readers= are the processes that run transform=: give one, or leave out readers=")
        if readers and not host_mark():
            raise UsageError(
                "readers= needs memory that processes share, which this system does not have: leave it out"
            )
        self._transform = transform
        self._name = "" if transform is None else transforms.shown(transform)
        self._readers = readers
        self._function = NamedFunction.of(transform) if readers and transform is not None else None
        self._pool: _Pool | None = None

    @property
    def has_readers(self) -> bool:
        return self._function is not None

    def put(self, batch: pa.RecordBatch | None, place: Callable[[], str], deliver: Callable[[Result], object]) -> None:
        """Transform a batch and deliver the result, possibly later and in another thread, but in the order of calls.

        Args:
            batch: The batch; None for an item that only keeps its position in the order.
            place: Returns the location of the batch's records, for error messages.
            deliver: Receives the transformed batch, or the error.
        """
        if batch is None and self._pool is None:
            deliver(batch)
        elif self._function is not None:
            if self._pool is None:
                self._pool = _Pool(self._function, self._readers)
            self._pool.put(_Job(batch, place, deliver))
        elif batch is None or self._transform is None:
            deliver(batch)
        else:
            try:
                found: Result = self.of(batch, place)
            except FlightedlError as error:
                found = error
            deliver(found)

    def of(self, batch: pa.RecordBatch, place: Callable[[], str]) -> pa.RecordBatch:
        """Transform a batch in this thread.

        Raises:
            UserCodeError: the transform failed.
            MachineError: this machine has too little memory, or lacks a package.
        """
        if self._transform is None:
            return batch
        try:
            return transforms.apply(self._transform, batch)
        except Exception as error:
            if (lacking := machine_error(error, f"{self._name} failed at {place()}")) is not None:
                raise lacking from error
            raise transforms.failed(self._name, place(), transforms.described(error)) from error

    def close(self) -> None:
        """Stop the readers without delivering the remaining batches. The next ``put`` starts them again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


class _Pool:
    def __init__(self, function: NamedFunction, readers: int) -> None:
        self._function = function
        self._readers = readers
        self._lock = threading.Lock()
        #: Conditions: a job can be put, and a reader thread can fetch a job. With two conditions,
        #: only threads that can continue are woken.
        self._has_room, self._has_work = threading.Condition(self._lock), threading.Condition(self._lock)
        #: All undelivered jobs, in order, and the jobs that no reader has started yet.
        self._jobs: deque[_Job] = deque()
        self._waiting: deque[_Job] = deque()
        self._is_closing = False
        self._processes: list[_Process] = []
        #: Held while delivering.
        self._delivering = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, name=f"flightedl-reader-{number}", daemon=True)
            for number in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: _Job) -> None:
        with self._lock:
            self._has_room.wait_for(lambda: self._is_closing or len(self._jobs) < _WAITING * self._readers)
            self._jobs.append(job)
            if job.batch is not None:
                self._waiting.append(job)
                self._has_work.notify()
        if job.batch is None:
            self._finish(job, None)

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._has_room.notify_all()
            self._has_work.notify_all()
            for process in self._processes:
                process.hang_up()
        for thread in self._threads:
            thread.join()

    # the readers' threads

    def _serve(self) -> None:
        process: _Process | None = None
        under_way: deque[_Job] = deque()
        while True:
            with self._lock:
                self._has_work.wait_for(lambda: self._is_closing or self._waiting or under_way)
                if self._is_closing:
                    break
                job = self._waiting.popleft() if self._waiting and len(under_way) < transforms.UNDER_WAY else None
            try:
                if job is not None:
                    under_way.append(job)
                    process = process or self._started()
                    process.send(job.batch)
                    continue
                assert process is not None
                text, batch = process.receive()
            except (OSError, EOFError):
                self._after_death(process, under_way)
                process = None
            except Exception as error:  # noqa: BLE001 - delivered in place of the batches
                if process is not None:
                    self._end(process)
                    process = None
                self._finish(under_way.popleft() if job is None else under_way.pop(), error)
                self._put_back(under_way)
            else:
                job = under_way.popleft()
                failed = transforms.failed(self._function.shown, job.place(), text) if batch is None else None
                self._finish(job, failed or batch)
        if process is not None:
            self._end(process)

    def _started(self) -> _Process:
        """Return a new reader process.

        Raises:
            ExhaustedError: no process could be created, or several in a row ended while they started. This is not the
                batch's fault.
        """
        for _ in range(_DEATHS_LIMIT):
            try:
                process = _Process()
            except OSError as error:
                raise ExhaustedError(f"this machine cannot start a reader: {error}") from error
            with self._lock:
                self._processes.append(process)
                if self._is_closing:
                    process.hang_up()
            try:
                process.begin(self._function)
            except (OSError, EOFError):
                ending = self._end(process)
            except BaseException:
                self._end(process)
                raise
            else:
                return process
        raise ExhaustedError(f"{_DEATHS_LIMIT} readers in a row have ended while they started{ending}")

    def _end(self, process: _Process) -> str:
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)
        return process.close()

    def _after_death(self, process: _Process | None, under_way: deque[_Job]) -> None:
        ending = "" if process is None else self._end(process)
        first = under_way[0]
        first.deaths += 1
        if first.deaths == _DEATHS_LIMIT:
            text = f"{_DEATHS_LIMIT} readers in a row have ended there{ending}"
            self._finish(under_way.popleft(), transforms.failed(self._function.shown, first.place(), text))
        self._put_back(under_way)

    def _put_back(self, under_way: deque[_Job]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(under_way))
            self._has_work.notify_all()
        under_way.clear()

    def _finish(self, job: _Job, result: Result) -> None:
        job.result, job.is_done = result, True
        with self._delivering:
            while True:
                with self._lock:
                    if self._is_closing or not self._jobs or not self._jobs[0].is_done:
                        return
                    job = self._jobs.popleft()
                    self._has_room.notify()
                job.deliver(job.result)


class _Process:
    """A reader process, and the socket connected to it."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._channel = transforms.Channel(self._connection)
        # Only the trainer handles Ctrl-C. Its readers exit when their sockets are closed.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "flightedl.client.data.transform_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=child_environment(**thread_environment(1, 1)),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def begin(self, function: NamedFunction) -> None:
        """Wait until the reader process has found the transform's function.

        Raises:
            UnusableTransformError: the reader process cannot find the function.
        """
        self._channel.send(msgspec.json.encode(function).decode())
        text, _ = self._channel.receive()
        if text:
            raise UnusableTransformError(f"a reader cannot use {function.shown}: {text}")

    def send(self, batch: pa.RecordBatch | None) -> None:
        self._channel.send("", batch)

    def receive(self) -> tuple[str, pa.RecordBatch | None]:
        return self._channel.receive()

    def hang_up(self) -> None:
        """Shut down the socket, which unblocks all threads that are waiting on it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> str:
        """Stop the process. Return its signal or exit code as text, or an empty string if it exited normally."""
        self.hang_up()
        self._connection.close()
        try:
            code = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return ""
        return f" (signal {-code})" if code < 0 else f" (exit code {code})" if code else ""
