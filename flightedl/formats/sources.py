"""Open files, and distinguish files that cannot be *read* from files that cannot be *parsed*.

pyarrow reports both cases as OSError. Therefore files are opened through :class:`WatchedFile`, which records failures
of its own reads. If a read has failed, the storage is the cause, and the file is never skipped as corrupt. Neither is a
file for which this machine lacks memory, a codec or a kernel. Only bytes that a decoder rejects are corrupt.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import xxhash

from flightedl.domain.retries import is_transient, machine_error
from flightedl.errors import DataError, FlightedlError, StoreError, UnavailableError, UnsupportedError
from flightedl.formats.chunks import CorruptChunkError, IndexOptions
from flightedl.formats.cutting import filled
from flightedl.ports import Files

#: Suffix -> compression of an entire file.
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

#: Errors of decoders, after those of the machine have been excluded.
_BROKEN = (
    pa.ArrowException,
    OSError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    struct.error,
    zlib.error,
)


class WatchedFile(io.RawIOBase):
    """A file that records failures of its reads."""

    def __init__(self, file: BinaryIO, url: str, digest: xxhash.xxh3_64 | None = None) -> None:
        super().__init__()
        self._file = file
        self._digest = digest
        self.url = url
        #: Exception that the storage raised, if any.
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with self._watched():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        with self._watched():
            data = self._file.read(-1 if size is None else size)
        if self._digest is not None:
            self._digest.update(data)
        return data

    def readinto(self, buffer: memoryview | bytearray, /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @property
    def is_local(self) -> bool:
        """True if the file has a descriptor, so reading parts of it is cheap."""
        try:
            return self._file.fileno() >= 0
        except OSError:
            return False

    def exactly(self, size: int) -> bytes:
        """Return the next ``size`` bytes. Raises EOFError if the file ends before that."""
        found = filled(self, size)
        if len(found) < size:
            raise EOFError(f"the file ends {size - len(found)} bytes too early")
        return found

    def buffer(self, size: int, head: bytes = b"") -> pa.Buffer:
        """Return ``head`` and the next ``size`` bytes, in memory from Arrow's pool, which reuses its pages.

        Raises:
            EOFError: the file ends too early.
        """
        found = pa.allocate_buffer(len(head) + size)
        view = memoryview(found).cast("B")
        view[: len(head)] = head
        filled = len(head)
        while filled < len(view):
            with self._watched():
                count = self._file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError(f"the file ends {len(view) - filled} bytes too early")
            filled += count
        return found

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error
            raise


@contextlib.contextmanager
def opened(files: Files, url: str, digest: xxhash.xxh3_64 | None = None) -> Iterator[WatchedFile]:
    """Yield the opened file, and close it when the block ends. ``digest`` receives all bytes that ``read`` returns.

    Raises:
        DataError: the file cannot be opened, or the store refuses to read it.
        UnavailableError: the store temporarily cannot read the file.
        CorruptChunkError: the caller found damaged content, without naming its location.
    """
    with WatchedFile(files.open(url), url, digest) as source, parsing(source, "its content"):
        yield source


@contextlib.contextmanager
def parsing(source: WatchedFile, place: str) -> Iterator[None]:
    """Convert exceptions of parsers to an error whose message contains the file and ``place``."""
    try:
        yield
    except FlightedlError:
        raise
    except Exception as error:
        cause = source.failure or error
        if (lacking := machine_error(cause, f"{source.url} cannot be read")) is not None:
            raise lacking from error
        if source.failure is not None:
            if is_transient(source.failure):
                text = f"{source.url} cannot be read at the moment: {reason(source.failure)}"
                raise UnavailableError(text) from error
            raise StoreError(f"{source.url} cannot be read: {reason(source.failure)}") from error
        if isinstance(error, NotImplementedError) or "decrypt" in str(error):
            text = f"{source.url}, {place}: pyarrow {pa.__version__} does not support it, unless it is damaged"
            raise UnsupportedError(f"{text} ({reason(error)}); install another version, or rewrite it") from error
        if isinstance(error, pa.ArrowCapacityError):
            raise DataError(f"{source.url}, {place} exceeds a limit of Arrow: {reason(error)}") from error
        if not isinstance(error, _BROKEN):
            raise
        raise CorruptChunkError(f"{source.url} is corrupt, {place}: {reason(error)}") from error


@contextlib.contextmanager
def until_damage(options: IndexOptions) -> Iterator[list[str]]:
    """Yield a list that receives a message about damage, if the options permit skipping; otherwise, raise the error."""
    skipped: list[str] = []
    try:
        yield skipped
    except CorruptChunkError as error:
        if not options.skip_corrupt:
            raise
        skipped.append(str(error))


def reason(error: BaseException) -> str:
    """Return the message of a library's error as one short line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def compression_of(url: str) -> str | None:
    """Return the compression that the suffix of a file implies: "gzip", "zstd" or None."""
    return next((name for suffix, name in _COMPRESSIONS.items() if url.lower().endswith(suffix)), None)


def without_compression(url: str) -> str:
    """Return the URL without ``.gz`` or ``.zst`` at its end."""
    return next((url[: -len(suffix)] for suffix in _COMPRESSIONS if url.lower().endswith(suffix)), url)
