"""Memory that two processes of one host map, which has no name: a memfd, whose descriptor goes over a Unix socket.

Nothing is left of it when both are gone, however they ended; and no limit of /dev/shm counts. Its owner writes; the
other one can only map it read-only. It is sealed against shrinking, which would end a reader by SIGBUS; so a received
descriptor is looked at before it is mapped: its seals, its size, and that it is of the file system that memfds are of
(pages of others, such as huge ones that were never reserved, may be missing).

The memory begins with the nonce of the stream that it belongs to. Both sides prove by it that they map the memory of
whom they talk to by Flight. Behind it are two words of its owner's: how many of the other one's messages it has
taken, and whether what it has lent is over. What is read or written before them, and after, stays so (``fence``).

Linux only. Elsewhere nothing of this is offered, and values travel by TCP.
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
#: Values of a stream that may be under way in one direction. Pages that were never written take no memory.
SIZE_BYTES = 32 << 20
#: What stands before the values: a page.
_START_BYTES = 4096
_MAGIC = b"flightedl memory"
_TAKEN_AT = 64
_OVER_AT = 128
_NAME = "flightedl-values"
_FUTURE_WRITE = 0x0010  # fcntl.F_SEAL_FUTURE_WRITE, which Python does not name.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@functools.cache
def host_mark() -> str:
    """What two processes that can share memory have in common; empty: this one cannot.

    Where it is equal, sockets without a file name reach from one to the other, and both are of one user. It proves
    nothing: whoever says it still has to hand over a descriptor.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{_NETWORK.stat().st_ino}/{os.geteuid()}"
    except OSError:
        return ""


class SharedMemory:
    """One memfd, mapped. It is unmapped when nobody refers to it or to its arrays any more."""

    def __init__(self, descriptor: int, mapping: mmap.mmap, nonce: bytes) -> None:
        self._fence = memory_fence()
        self._descriptor = descriptor
        whole = np.frombuffer(mapping, np.uint8)
        self._over = whole[_OVER_AT : _OVER_AT + 8].view(np.uint64)
        self.nonce = nonce
        #: (n,) where values lie; read-only where another process owns it.
        self.values: Bytes = whole[_START_BYTES:]
        self._taken = whole[_TAKEN_AT : _TAKEN_AT + 8].view(np.uint64)

    def __del__(self) -> None:
        self.sent()

    @classmethod
    def create(cls, nonce: bytes, size_bytes: int = SIZE_BYTES, name: str = _NAME) -> Self:
        """Memory of this process; ``name``: what /proc calls it, for people.

        Raises:
            UnavailableError: the system gives none.
        """
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
            raise UnavailableError(f"this system shares no memory: {str(error)[:160]}") from None

    @classmethod
    def received(cls, descriptor: int, nonce: bytes | None) -> Self:
        """Another process's memory, whose descriptor came from it; closes the descriptor whatever comes.

        Args:
            descriptor: As it came.
            nonce: Of the stream; None: it is of no stream, but of the process, and has any size.

        Raises:
            MessageError: it is not what it has to be; nothing was mapped, or nothing is any more.
        """
        try:
            status = os.fstat(descriptor)
            size_bytes = status.st_size
            if status.st_dev != _device_of_memory():
                raise MessageError("the memory that came is no plain memfd")
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise MessageError("the memory that came is not sealed: it could shrink, or be written by its reader")
            if nonce is not None and size_bytes != _START_BYTES + SIZE_BYTES:
                raise MessageError(
                    f"the memory that came has {size_bytes} bytes, not {_START_BYTES + SIZE_BYTES}: another version?"
                )
            if size_bytes < _START_BYTES:
                raise MessageError(f"the memory that came has {size_bytes} bytes, less than its own beginning")
            mapping = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            raise MessageError(f"the memory that came cannot be mapped: {str(error)[:160]}") from None
        finally:
            os.close(descriptor)
        if not mapping[: len(_MAGIC) + NONCE_BYTES].startswith(_MAGIC + (nonce or b"")):
            mapping.close()
            raise MessageError("the memory that came is of another stream")
        _prefer_huge_pages(mapping)
        return cls(-1, mapping, nonce or b"")

    def descriptor(self) -> int:
        """To be sent to the other process; only of own memory, before ``sent``."""
        found: int = self.__dict__.get("_descriptor", -1)
        return found

    def sent(self) -> None:
        """The other one has it, or never will: from now on it is the mapping that holds the memory."""
        descriptor = self.__dict__.pop("_descriptor", -1)
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def taken(self) -> int:
        """How many messages of the other side's memory its owner has taken, as it says.

        What is written by who asks comes after what the owner has read, and for the owner it is the other way round.
        """
        count = int(self._taken[0])
        self._fence()
        return count

    @taken.setter
    def taken(self, count: int) -> None:
        self._fence()
        self._taken[0] = count

    @property
    def is_over(self) -> bool:
        """Whether its owner has taken back what it lent beside it: what was read until now may have changed."""
        self._fence()
        return bool(self._over[0])

    def end(self) -> None:
        """Say so, before anything of that changes."""
        self._over[0] = 1
        self._fence()


def _prefer_huge_pages(mapping: mmap.mmap) -> None:
    # Only a matter of speed, and not every kernel has them for memory that is shared.
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


@functools.cache
def _device_of_memory() -> int:
    """Of the file system that the kernel keeps memfds in."""
    descriptor = os.memfd_create(_NAME)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _FUTURE_WRITE if sys.platform == "linux" else 0
