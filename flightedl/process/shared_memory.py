"""Unnamed memory that two processes on a host map: a memfd whose descriptor is sent over a Unix socket.

The memory is freed when both processes have ended, however they ended, and the limit of /dev/shm does not apply to it.
Its owner writes; the other process can map it only for reading. It is sealed against shrinking, because SIGBUS would
kill a process that reads memory after it has shrunk.

Before a received descriptor is mapped, its seals, size and file system are checked. The file system must be that of
memfds, because pages of other files may be missing, for example huge pages that were never reserved.

The memory begins with the nonce of its stream, which proves to both processes that they map the memory of their Flight
peer. Two words follow, which the owner writes: the number of the peer's messages that the owner has consumed, and a
flag by which the owner revokes memory that it has lent. Fences order the accesses to these words and to the values
(``fence``).

Requires Linux. On other systems, values travel over TCP.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import sys
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from flightedl.errors import MessageError, UnavailableError
from flightedl.process.fence import memory_fence

Bytes = npt.NDArray[np.uint8]

NONCE_BYTES = 16
#: Capacity for values in flight in one direction, in bytes. Pages that were never written take no memory.
SIZE_BYTES = 32 << 20
#: Size of the header that precedes the values: one page.
_START_BYTES = 4096
_MAGIC = b"flightedl memory"
_CONSUMED_AT = 64
_OVER_AT = 128
_NAME = "flightedl-values"
_FUTURE_WRITE = 0x0010  # Value of fcntl.F_SEAL_FUTURE_WRITE, for which Python has no name.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@functools.cache
def host_mark() -> str:
    """Return a string that is equal in processes that can share memory; empty if this process cannot.

    Processes that share memory run as the same user and can connect by abstract sockets. A peer must also send a
    descriptor.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{_NETWORK.stat().st_ino}/{os.geteuid()}"
    except OSError:
        return ""


class SharedMemory:
    """A mapped memfd. It is unmapped when there are no more references to it or to its arrays."""

    def __init__(self, descriptor: int, mapping: mmap.mmap, nonce: bytes) -> None:
        self._fence = memory_fence()
        self._descriptor = descriptor
        whole = np.frombuffer(mapping, np.uint8)
        self._over = whole[_OVER_AT : _OVER_AT + 8].view(np.uint64)
        self.nonce = nonce
        #: (n,) bytes for values; read-only if another process owns the memory.
        self.values: Bytes = whole[_START_BYTES:]
        self._consumed = whole[_CONSUMED_AT : _CONSUMED_AT + 8].view(np.uint64)

    def __del__(self) -> None:
        self.sent()

    @classmethod
    def create(cls, nonce: bytes, size_bytes: int = SIZE_BYTES, name: str = _NAME) -> Self:
        """Allocate memory of this process, named in /proc. Raises UnavailableError if that is impossible."""
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, _START_BYTES + size_bytes)
                mapping = mmap.mmap(descriptor, _START_BYTES + size_bytes)
                mapping[: len(_MAGIC)] = _MAGIC
                mapping[len(_MAGIC) : len(_MAGIC) + NONCE_BYTES] = nonce
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                _prefer_huge_pages(mapping)
                return cls(descriptor, mapping, nonce)
            except BaseException:
                os.close(descriptor)
                raise
        except (OSError, ValueError, AttributeError) as error:
            raise UnavailableError(f"this system cannot share memory: {str(error)[:160]}") from None

    @classmethod
    def received(cls, descriptor: int, nonce: bytes | None) -> Self:
        """Map another process's memory by the descriptor that it sent. Always closes the descriptor.

        Args:
            descriptor: The received descriptor.
            nonce: Nonce of the stream; None if the memory belongs to a process, not to a stream, and has any size.

        Raises:
            MessageError: the memory is invalid. It does not stay mapped.
        """
        try:
            status = os.fstat(descriptor)
            size_bytes = status.st_size
            if status.st_dev != _device_of_memory():
                raise MessageError("the received memory is not a plain memfd")
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise MessageError("the received memory is not sealed: it could shrink, or be written by its reader")
            if nonce is not None and size_bytes != _START_BYTES + SIZE_BYTES:
                raise MessageError(
                    f"the received memory has {size_bytes} bytes, not {_START_BYTES + SIZE_BYTES}: another version?"
                )
            if size_bytes < _START_BYTES:
                raise MessageError(f"the received memory has {size_bytes} bytes, less than its header")
            mapping = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise MessageError(f"the received memory cannot be mapped: {str(error)[:160]}") from None
        finally:
            os.close(descriptor)
        if not mapping[: len(_MAGIC) + NONCE_BYTES].startswith(_MAGIC + (nonce or b"")):
            mapping.close()
            raise MessageError("the received memory belongs to another stream")
        _prefer_huge_pages(mapping)
        return cls(-1, mapping, nonce or b"")

    def descriptor(self) -> int:
        """Return the descriptor to send to the other process. Only the owner may call this, before ``sent``."""
        found: int = self.__dict__.get("_descriptor", -1)
        return found

    def sent(self) -> None:
        """Close the descriptor: the other process has it or will not need it. The mapping keeps the memory alive."""
        descriptor = self.__dict__.pop("_descriptor", -1)
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def consumed(self) -> int:
        """Number of the other process's messages that the owner of this memory has consumed.

        A fence ensures that the reader's later writes are ordered after the owner's earlier reads.
        """
        count = int(self._consumed[0])
        self._fence()
        return count

    @consumed.setter
    def consumed(self, count: int) -> None:
        self._fence()
        self._consumed[0] = count

    @property
    def is_over(self) -> bool:
        """True if the owner has revoked the lent memory: data read from it so far may have changed."""
        self._fence()
        return bool(self._over[0])

    def end(self) -> None:
        """Revoke the lent memory. Must be called before any of it is changed."""
        self._over[0] = 1
        self._fence()


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    # Huge pages are only an optimization, and some kernels do not support them for shared memory.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


@functools.cache
def _device_of_memory() -> int:
    descriptor = os.memfd_create(_NAME)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _FUTURE_WRITE if sys.platform == "linux" else 0
