"""The user's ``transform``: a function from batch to batch that runs in this process or in reader processes.

No code is sent over a socket. A reader process finds the function by its name: it imports the function's module, or
runs the script under a name other than ``__main__``. Batches are passed in shared memory in both directions.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from flightedl.client.data.elements import ByIndex
from flightedl.errors import DataError, UsageError, UserCodeError
from flightedl.formats.reader import as_batch
from flightedl.formats.sources import reason
from flightedl.process.shared_memory import NONCE_BYTES, SharedMemory

Transform = Callable[[pa.RecordBatch], pa.RecordBatch | pa.Table]

#: Maximum number of batches in flight to a reader.
UNDER_WAY = 2
#: Lengths of the text and of the batch (0 without a batch), and True if the batch is in newly mapped memory.
_HEAD = struct.Struct("<IQ?")
_LEAST_BYTES = 1 << 20
_SCRIPT = "__flightedl_reader__"
_SHOWN_LINES = 3


class UnusableTransformError(UsageError):
    """The reader processes cannot import the transform, so no batch can be transformed."""


class ElementForm(msgspec.Struct, frozen=True):
    """Arguments of ``ByIndex`` other than the function."""

    is_batched: bool
    columns: tuple[str, ...]
    first: int


class NamedFunction(msgspec.Struct, frozen=True):
    """A transform with a name by which another process can find it."""

    module: str
    name: str
    #: Script that defines the function; empty if a module defines it.
    file: str
    path: list[str]
    #: Arguments of the ``ByIndex`` that wraps the named function; None if the function is itself the transform.
    form: ElementForm | None = None

    @classmethod
    def of(cls, transform: Transform) -> NamedFunction:
        """Return the name by which a transform's function can be found.

        Raises:
            UsageError: other processes cannot find the function.
        """
        function: Callable[..., Any] = transform
        form = None
        if isinstance(transform, ByIndex):
            function = transform.get
            form = ElementForm(transform.is_batched, transform.columns, transform.first)
        name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
        file = getattr(getattr(function, "__code__", None), "co_filename", "") if module == "__main__" else ""
        # A reader could find the method's function, but not the object to which it is bound.
        is_lost = not name or "<" in name or (module == "__main__" and not Path(file).is_file())
        if is_lost or inspect.ismethod(function):
            raise UsageError(
                f"{'transform' if form is None else 'get'}={function!r:.80} cannot be found by readers: give a "
                "function that a module or script has at its top level, or leave out readers="
            )
        return cls(module, name, str(Path(file).absolute()) if file else "", sys.path, form)

    @property
    def shown(self) -> str:
        """Return the name of the argument that contains the function, for messages."""
        return f"{'transform' if self.form is None else 'get'}={self.name}"

    def find(self) -> Transform:
        sys.path[:] = self.path
        names = self.name.split(".")
        if self.file:
            found = runpy.run_path(self.file, run_name=_SCRIPT)[names.pop(0)]
        else:
            found = importlib.import_module(self.module)
        for name in names:
            found = getattr(found, name)
        if self.form is None:
            return found  # type: ignore[no-any-return]
        return ByIndex(found, self.form.is_batched, self.form.columns, self.form.first)


class _ThisProcess:
    is_reader = False


def mark_reader() -> None:
    """Mark this process as a reader."""
    _ThisProcess.is_reader = True


def require_no_reader() -> None:
    """Raise UsageError in a reader process, because its script has tried to join a job at the top level."""
    if _ThisProcess.is_reader:
        raise UsageError(
            "the script that has transform= joins the job when a reader runs it: "
            'put that under `if __name__ == "__main__":`, or the function into a module'
        )


def apply(transform: Transform, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the transformed batch.

    Raises:
        DataError: the result is not a batch.
        Exception: the transform raised it.
    """
    found = transform(batch)
    if isinstance(found, pa.Table):
        found = as_batch(found)
    if not isinstance(found, pa.RecordBatch):
        raise DataError(f"it returned {type(found).__name__}, but must return a pyarrow.RecordBatch")
    return found


def shown(transform: Transform) -> str:
    """Return the name of the argument that contains the transform, for messages."""
    what, function = ("get", transform.get) if isinstance(transform, ByIndex) else ("transform", transform)
    return f"{what}={getattr(function, '__qualname__', type(function).__name__)}"


def described(error: BaseException) -> str:
    """Return a transform's error as text, with its notes and the innermost lines of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-_SHOWN_LINES:]
    lines = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    notes = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
    return f"{notes}{type(error).__name__}: {reason(error)} ({lines})"


def failed(name: str, place: str, text: str) -> UserCodeError:
    """Return the error to raise if the transform failed for these records."""
    return UserCodeError(f"{name} failed at {place}: {text}")


def as_exception(error: BaseException) -> Exception:
    """Return the error to raise in the loop for an error in a reader thread, which the user's code may want to end."""
    if isinstance(error, Exception):
        return error
    return UserCodeError(f"transform= or decode= cannot end the script, but raised {described(error)}")


class Channel:
    """One end of a socket that carries text, and batches in shared memory. Not thread-safe.

    Each end owns ``UNDER_WAY`` pieces of memory, one per batch in flight, and uses them in turn, because mapping new
    memory for every batch would take longer than copying. The receiver copies each batch, so its piece can be reused.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._own: list[SharedMemory | None] = [None] * UNDER_WAY
        self._theirs: list[SharedMemory | None] = [None] * UNDER_WAY
        self._sent = self._received = 0

    def send(self, text: str, batch: pa.RecordBatch | None = None) -> None:
        """Send text and optionally a batch. At most ``UNDER_WAY`` - 1 earlier batches may still be in flight."""
        body = text.encode()
        size, new = 0, None
        if batch is not None:
            slot = self._sent % UNDER_WAY
            self._sent += 1
            memory = self._own[slot]
            if memory is None or not (size := _written(batch, memory)):
                counted = pa.MockOutputStream()
                _write(batch, counted)
                capacity = max(_LEAST_BYTES, 1 << (counted.size() - 1).bit_length())
                self._own[slot] = new = SharedMemory.create(bytes(NONCE_BYTES), capacity, "flightedl-batches")
                size = _written(batch, new)
        message = _HEAD.pack(len(body), size, new is not None) + body
        sent = socket.send_fds(self._connection, [message], [] if new is None else [new.descriptor()])
        if new is not None:
            new.sent()
        if sent < len(message):
            self._connection.sendall(message[sent:])

    def receive(self) -> tuple[str, pa.RecordBatch | None]:
        """Return the text and the batch of the next message.

        Raises:
            EOFError: the other process has ended.
        """
        head, descriptors, _, _ = socket.recv_fds(self._connection, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
        body_size, size, is_new = _HEAD.unpack(head + self._exactly(_HEAD.size - len(head)))
        text = self._exactly(body_size).decode()
        if not size:
            return text, None
        slot = self._received % UNDER_WAY
        self._received += 1
        if is_new:
            self._theirs[slot] = SharedMemory.received(descriptors[0], None)
        memory = self._theirs[slot]
        assert memory is not None, "the first batch comes with its memory"
        copied = pa.allocate_buffer(size)
        np.copyto(np.frombuffer(copied, np.uint8), memory.values[:size])
        with pa.ipc.open_stream(copied) as stream:
            return text, stream.read_next_batch()

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._connection.recv(size)
            if not part:
                raise EOFError("the other process has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _written(batch: pa.RecordBatch, memory: SharedMemory) -> int:
    """Write a batch to memory. Return its length, or 0 if it does not fit."""
    sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory.values))
    try:
        _write(batch, sink)
    except OSError:
        return 0
    return int(sink.tell())


def _write(batch: pa.RecordBatch, sink: Any) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
