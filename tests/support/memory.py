"""In-memory twins of Storage and Files, and the in-memory Coordinator for tests that advance its clock."""

from __future__ import annotations

import fnmatch
import io
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO

from flightedl.adapters import memory
from flightedl.errors import CorruptError, DataError, NotFoundError, StoreError
from flightedl.ports import Clock, FileListing, FileStat, StoredFile
from tests.support.faults import FaultPlan
from tests.support.faulty_coordinator import FaultyCoordinator

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MemoryCoordinator", "MemoryFiles", "MemoryStorage"]

_POLL_S = 0.005


class MemoryCoordinator(FaultyCoordinator):
    """See ``adapters.memory``. To make a lease expire, a test only has to advance a FakeClock."""

    def __init__(self, clock: Clock, store: memory.MemoryStore | None = None) -> None:
        super().__init__(clock, store or memory.MemoryStore(clock, _POLL_S))


class MemoryStorage:
    """See ``ports.Storage``.

    Points of the fault plan: ``publish:start``, ``publish:part`` (for each part), ``publish:end`` (before the file
    becomes visible), ``publish:done`` (after it has become visible), ``read``, ``list`` and ``delete``.
    """

    def __init__(self, url: str = "memory://storage", plan: FaultPlan | None = None) -> None:
        self.plan = plan or FaultPlan()
        self._url = url
        self._lock = threading.Lock()
        #: Stored bytes by name. Tests may truncate and corrupt them.
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return self._url

    def read(self, name: str) -> bytes:
        self.plan.reached("read")
        with self._lock:
            if name not in self.files:
                raise NotFoundError(f"there is no {self._url}/{name}")
            return self.files[name]

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        found = self.read(name)[offset : offset + length]
        if len(found) < length:
            raise CorruptError(f"{self._url}/{name} ends before {offset + length}: it is truncated")
        return found

    def publish(
        self, name: str, parts: Iterable[bytes | memoryview], require: Callable[[], None] = lambda: None
    ) -> int:
        self.plan.reached("publish:start")
        collected = bytearray()
        for part in parts:
            self.plan.reached("publish:part")
            collected += part
        self.plan.reached("publish:end")
        require()
        with self._lock:
            self.files[name] = bytes(collected)
        self.plan.reached("publish:done")
        return len(collected)

    def list(self, prefix: str) -> tuple[StoredFile, ...]:
        self.plan.reached("list")
        with self._lock:
            names = sorted(name for name in self.files if name.startswith(prefix))
            return tuple(StoredFile(name, len(self.files[name])) for name in names)

    def delete(self, name: str) -> None:
        self.plan.reached("delete")
        with self._lock:
            self.files.pop(name, None)


class MemoryFiles:
    """In-memory twin of ``ports.Files``. ``contents`` maps URLs to bytes. Tests may add, change and remove files.

    Points of the fault plan: ``expand``, ``stat``, ``open``, and ``file:read`` for each read of an open file.
    """

    def __init__(self, contents: Mapping[str, bytes] | None = None, plan: FaultPlan | None = None) -> None:
        self.contents: dict[str, bytes] = dict(contents or {})
        self.plan = plan or FaultPlan()

    def declare(self, urls: Sequence[str], moved: Mapping[str, str] | None = None) -> None:
        """Nothing to remember: contents have their declared names."""

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> FileListing:
        self.plan.reached("expand")
        found: dict[str, FileStat] = {}
        for pattern in patterns:
            matching = [
                url
                for url in self.contents
                if url == pattern
                or (fnmatch.fnmatchcase(url, pattern) and not url.rpartition("/")[2].startswith(("_", ".")))
            ]
            if not matching and not may_be_empty:
                raise DataError(f"no file matches {pattern}: check the path or the pattern")
            found.update((url, self._stat(url)) for url in matching)
        return FileListing(found[url] for url in sorted(found))

    def stat(self, url: str) -> FileStat | None:
        self.plan.reached("stat")
        return self._stat(url) if url in self.contents else None

    def _stat(self, url: str) -> FileStat:
        content = self.contents[url]
        return FileStat(url, len(content), f"{len(content)}-{hash(content):x}")

    def open(self, url: str) -> BinaryIO:
        self.plan.reached("open")
        if url not in self.contents:
            raise StoreError(f"there is no file {url}: check the path")
        return _MemoryFile(self.contents[url], self.plan)


class _MemoryFile(io.BytesIO):
    def __init__(self, content: bytes, plan: FaultPlan) -> None:
        super().__init__(content)
        self._plan = plan

    def read(self, size: int | None = -1, /) -> bytes:
        self._plan.reached("file:read")
        return super().read(size)

    def readinto(self, buffer: Buffer, /) -> int:
        self._plan.reached("file:read")
        return super().readinto(buffer)
