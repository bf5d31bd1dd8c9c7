"""The user's ``transform``: a function that makes one batch of another, in this process or in ``readers`` of their own.

Readers get the function by its name, because no code crosses a socket: they import its module, or run the script that
has it under a name other than ``__main__``. Batches go there and come back in memory that both processes map.
"""

from __future__ import annotations

import importlib
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

from flightedl.errors import DataError, UsageError
from flightedl.formats.reader import as_batch
from flightedl.formats.sources import reason
from flightedl.process.shared_memory import NONCE_BYTES, SharedMemory

Transform = Callable[[pa.RecordBatch], pa.RecordBatch | pa.Table]

_HEAD = struct.Struct("<I?")
_SCRIPT = "__flightedl_reader__"
_SHOWN_LINES = 3


class UnusableTransformError(UsageError):
    """Readers cannot import the transform: no batch can be transformed."""


class NamedFunction(msgspec.Struct, frozen=True):
    """A function that another process finds by its name."""

    module: str
    name: str
    #: Script that has it; empty: a module has it.
    file: str
    path: list[str]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> NamedFunction:
        """Return the name of a function.

        Raises:
            UsageError: other processes cannot find it.
        """
        name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
        file = getattr(getattr(function, "__code__", None), "co_filename", "") if module == "__main__" else ""
        if not name or "<" in name or (module == "__main__" and not Path(file).is_file()):
            raise UsageError(
                f"transform={function!r:.80} cannot be found by readers: give a function that a module or script has "
                "at its top level, or leave out readers="
            )
        return cls(module, name, str(Path(file).absolute()) if file else "", sys.path)

    def find(self) -> Callable[..., Any]:
        """Return the function, in another process."""
        sys.path[:] = self.path
        names = self.name.split(".")
        if self.file:
            found = runpy.run_path(self.file, run_name=_SCRIPT)[names.pop(0)]
        else:
            found = importlib.import_module(self.module)
        for name in names:
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]


def require_no_reader() -> None:
    """Raise UsageError in a reader, which has run a script that trains as soon as it is run."""
    if _IN_READER in sys.modules:
        raise UsageError(
            "the script that has transform= joins the job when a reader runs it: "
            'put that under `if __name__ == "__main__":`, or the function into a module'
        )


_IN_READER = "flightedl.client.data.in_reader"


def mark_reader() -> None:
    """Note that this process is a reader."""
    sys.modules[_IN_READER] = sys.modules[__name__]


def apply(transform: Transform, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return what the transform makes of a batch.

    Raises:
        DataError: it is no batch.
        Exception: what the transform raises.
    """
    found = transform(batch)
    if isinstance(found, pa.Table):
        found = as_batch(found)
    if not isinstance(found, pa.RecordBatch):
        raise DataError(f"it returned {type(found).__name__}, but must return a pyarrow.RecordBatch")
    return found


def told(error: BaseException) -> str:
    """Return an error of a transform with its innermost lines."""
    frames = traceback.extract_tb(error.__traceback__)[-_SHOWN_LINES:]
    lines = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    return f"{type(error).__name__}: {reason(error)} ({lines})"


def failed(name: str, place: str, text: str) -> DataError:
    """Return the error of a transform that failed at these records."""
    return DataError(f"transform={name} failed at {place}: {text}")


def send(connection: socket.socket, text: str, batch: pa.RecordBatch | None = None) -> None:
    """Send text, and a batch in memory of its own."""
    body = text.encode()
    memory = None if batch is None else _shared(batch)
    head = _HEAD.pack(len(body), memory is not None)
    socket.send_fds(connection, [head], [] if memory is None else [memory.descriptor()])
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[str, pa.RecordBatch | None]:
    """Return what was sent. The batch stays in the shared memory.

    Raises:
        EOFError: the other process has ended.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
    size, has_batch = _HEAD.unpack(head + _exactly(connection, _HEAD.size - len(head)))
    text = _exactly(connection, size).decode()
    if not has_batch:
        return text, None
    memory = SharedMemory.received(descriptors[0], None)
    with pa.ipc.open_stream(pa.py_buffer(memory.values)) as stream:
        return text, stream.read_next_batch()


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = connection.recv(size)
        if not part:
            raise EOFError("the other process has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _shared(batch: pa.RecordBatch) -> SharedMemory:
    counted = pa.MockOutputStream()
    _write(batch, counted)
    memory = SharedMemory.create(bytes(NONCE_BYTES), counted.size(), "flightedl-batch")
    _write(batch, pa.FixedSizeBufferWriter(pa.py_buffer(np.asarray(memory.values))))
    return memory


def _write(batch: pa.RecordBatch, sink: Any) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
