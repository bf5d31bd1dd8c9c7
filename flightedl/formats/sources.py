"""Opening files, and telling a file that cannot be *reached* from one that cannot be *understood*.

pyarrow reports both as OSError. So files are opened through :class:`WatchedFile`, which remembers whether one of its
own reads failed: if so the store is to blame (never skipped as corrupt), else the bytes are.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from flightedl.domain.retries import is_transient
from flightedl.errors import DataError, FlightedlError, UnavailableError
from flightedl.formats.chunks import CorruptChunkError, IndexOptions
from flightedl.ports import Files

#: Compression of a whole file, by the end of its name.
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}

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
    """A file of the port that remembers the failure of its own reads."""

    def __init__(self, file: BinaryIO, url: str) -> None:
        super().__init__()
        self._file = file
        self.url = url
        #: What the store raised, if it did.
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
            return self._file.read(-1 if size is None else size)

    def readinto(self, buffer: memoryview | bytearray, /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def exactly(self, size: int) -> bytes:
        """The next ``size`` bytes; EOFError when the file ends before."""
        parts: list[bytes] = []
        missing = size
        while missing and (part := self.read(missing)):
            parts.append(part)
            missing -= len(part)
        if missing:
            raise EOFError(f"the file ends {missing} bytes too early")
        return parts[0] if len(parts) == 1 else b"".join(parts)

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
def opened(files: Files, url: str) -> Iterator[WatchedFile]:
    """The file, closed at the end.

    Raises:
        DataError: it cannot be opened, or the store refuses to read it.
        UnavailableError: the store cannot read it at the moment.
        CorruptChunkError: whoever read it found the content broken, and did not say where.
    """
    with WatchedFile(files.open(url), url) as source, parsing(source, "its content"):
        yield source


@contextlib.contextmanager
def parsing(source: WatchedFile, place: str) -> Iterator[None]:
    """Turn what parsers raise into one sentence that names the file and ``place``."""
    try:
        yield
    except FlightedlError:
        raise
    except Exception as error:
        if source.failure is not None:
            if is_transient(source.failure):
                text = f"{source.url} cannot be read at the moment: {reason(source.failure)}"
                raise UnavailableError(text) from error
            raise DataError(f"{source.url} cannot be read: {reason(source.failure)}") from error
        if not isinstance(error, _BROKEN):
            raise
        raise CorruptChunkError(f"{source.url} is corrupt, {place}: {reason(error)}") from error


@contextlib.contextmanager
def until_damage(options: IndexOptions) -> Iterator[list[str]]:
    """Yield a list that gets the sentence about damage if options say that it is passed over; else it raises."""
    skipped: list[str] = []
    try:
        yield skipped
    except CorruptChunkError as error:
        if not options.skip_corrupt:
            raise
        skipped.append(str(error))


def reason(error: BaseException) -> str:
    """Return the message of a library's error in one short line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def compression_of(url: str) -> str | None:
    """Return the compression of a whole file by the end of its name: "gzip", "zstd" or None."""
    return next((name for suffix, name in _COMPRESSIONS.items() if url.lower().endswith(suffix)), None)


def without_compression(url: str) -> str:
    """The URL without ``.gz`` or ``.zst`` at its end."""
    return next((url[: -len(suffix)] for suffix in _COMPRESSIONS if url.lower().endswith(suffix)), url)
