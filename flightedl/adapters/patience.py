"""Files and Storage that retry if the store fails temporarily (``domain.retries``).

If a read fails in the middle of a file, the file is opened again, and reading continues at the same position. Readers
check the file's version afterwards, so they notice a file that was replaced during the read.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from flightedl.domain.retries import Patience
from flightedl.ports import Clock, FileListing, Files, FileStat, Storage, StoredFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Persistence:
    """Repeats calls whose errors are transient. Thread-safe.

    Args:
        patience: The policy.
        clock: Clock of the retries.
        stop: Ends the wait for the next attempt.
    """

    def __init__(self, patience: Patience, clock: Clock, stop: threading.Event | None = None) -> None:
        self._patience = patience
        self._clock = clock
        self._stop = threading.Event() if stop is None else stop
        #: Most recent transient error of a call that is being repeated; empty if no call is being repeated.
        self.trouble = ""

    def __call__(self, attempt: Callable[[], Result]) -> Result:
        """Return the result of the first successful attempt, or raise the first error that should not be retried."""
        started_at, failures = self._clock.now(), 0
        while True:
            try:
                result = attempt()
            except Exception as error:
                failures += 1
                pause_s = self._patience.pause_s(error, failures, self._clock.now() - started_at)
                if pause_s is None:
                    self.trouble = ""
                    raise
                if (trouble := str(error)) != self.trouble:
                    _log.warning("trying again: %s", trouble)
                self.trouble = trouble
                if self._stop.wait(pause_s):
                    raise
            else:
                if failures:
                    self.trouble = ""
                return result


class PatientFiles:
    """See ``ports.Files``."""

    def __init__(self, files: Files, persistence: Persistence) -> None:
        self._files = files
        self._persist = persistence

    @property
    def trouble(self) -> str:
        """Reason why the store cannot be read at the moment; empty if it can."""
        return self._persist.trouble

    def declare(self, urls: Sequence[str], moved: Mapping[str, str] | None = None) -> None:
        self._files.declare(urls, moved)

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> FileListing:
        return self._persist(partial(self._files.expand, patterns, may_be_empty=may_be_empty))

    def stat(self, url: str) -> FileStat | None:
        return self._persist(partial(self._files.stat, url))

    def open(self, url: str) -> BinaryIO:
        open_file = partial(self._files.open, url)
        return cast("BinaryIO", _PatientFile(self._persist(open_file), open_file, self._persist))


class _PatientFile(io.RawIOBase):
    def __init__(self, file: BinaryIO, open_again: Callable[[], BinaryIO], persist: Persistence) -> None:
        super().__init__()
        self._file: BinaryIO | None = file
        self._open_again = open_again
        self._persist = persist
        self._position = 0

    def _at_position(self) -> BinaryIO:
        if self._file is None:
            self._file = self._open_again()
            self._file.seek(self._position)
        return self._file

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._position = self._persist(lambda: self._at_position().seek(offset, whence))
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._persist(partial(self._read, -1 if size is None else size))
        self._position += len(data)
        return data

    def readinto(self, buffer: Buffer, /) -> int:
        count: int = self._persist(partial(self._from_file, lambda file: file.readinto(buffer)))
        self._position += count
        return count

    def _read(self, size: int) -> bytes:
        data: bytes = self._from_file(lambda file: file.read(size))
        return data

    def _from_file(self, read: Callable[[Any], Result]) -> Result:
        try:
            return read(self._at_position())
        except Exception:
            self._forget()
            raise

    def _forget(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):
                file.close()

    def close(self) -> None:
        self._forget()
        super().close()


class PatientStorage:
    """See ``ports.Storage``. Publishing is retried only if the parts of the file are a sequence."""

    def __init__(self, storage: Storage, persistence: Persistence) -> None:
        self._storage = storage
        self._persist = persistence

    @property
    def url(self) -> str:
        return self._storage.url

    def read(self, name: str) -> bytes:
        return self._persist(partial(self._storage.read, name))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        return self._persist(partial(self._storage.read_range, name, offset, length))

    def publish(
        self, name: str, parts: Iterable[bytes | memoryview], require: Callable[[], None] = lambda: None
    ) -> int:
        publish = partial(self._storage.publish, name, parts, require)
        return self._persist(publish) if isinstance(parts, Sequence) else publish()

    def list(self, prefix: str) -> tuple[StoredFile, ...]:
        return self._persist(partial(self._storage.list, prefix))

    def delete(self, name: str) -> None:
        self._persist(partial(self._storage.delete, name))
