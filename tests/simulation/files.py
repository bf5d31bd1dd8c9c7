"""Checkpoint store of the simulation: an fsspec file system with the faults that a scenario has.

A store is one of two kinds. An object store receives a file as one request: it stores the file some time later, even if
the writer is dead by then. A disk shows a file while it grows: a writer that dies leaves a part of it.

Without faults, no request takes time or draws anything, so the store does not change a seed's order of threads.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path
from threading import get_ident, main_thread
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from tests.simulation.scheduler import Process, require_running, running, this_process

URL = "simulated://"
#: Part of the requests of a faulty store that are carried out, although their reply is an error.
_CARRIED_OUT = 0.3


class Store:
    """The files of one simulation.

    Args:
        is_disk: See the module.
        delay_s: Maximum virtual seconds that a request takes.
    """

    def __init__(self, *, is_disk: bool = False, delay_s: float = 0.0) -> None:
        self.is_disk = is_disk
        self.delay_s = delay_s
        #: Path -> content.
        self.files: dict[str, bytes] = {}
        #: All files that were written completely, including those deleted or damaged later.
        self.written: dict[str, bytes] = {}
        #: Path of a damaged file -> its content before the damage.
        self.damaged: dict[str, bytes] = {}
        #: True if any file was ever damaged.
        self.has_damage = False
        #: Additional seconds of each request until this time.
        self.slow_s = 0.0
        self.error_chance = 0.0
        self.is_full = False
        self.failure_count = 0
        #: Called with "write" before, within and after each write of a process, for aimed faults.
        self.watchers: list[Callable[[Process, str, str], None]] = []
        self._chance = require_running().stream("files")

    def request(self) -> None:
        """Wait as long as a request takes. Raises OSError if it fails."""
        if self.delay_s or self.slow_s:
            require_running().sleep(self._delay_s())
        self._maybe_fail()

    def write(self, path: str, data: bytes) -> None:
        """Write a file. Raises OSError if that fails, though the file may have been written."""
        self._watch("before")
        if self.is_disk:
            self._grow(path, data)
        else:
            self._put(path, data)
        self._watch("after")

    def _watch(self, when: str) -> None:
        for watcher in self.watchers:
            watcher(this_process(), "write", when)

    def _grow(self, path: str, data: bytes) -> None:
        self.request()
        self.files[path] = data[: len(data) // 2]
        self._watch("within")
        self.request()
        if self.is_full:
            self._refuse()
        self._keep(path, data)

    def _put(self, path: str, data: bytes) -> None:
        delay_s = self._delay_s()
        is_refused = self.is_full or self._draws(self.error_chance)
        if not is_refused or (not self.is_full and self._draws(_CARRIED_OUT)):
            if delay_s:
                require_running().after(delay_s / 2, lambda: self._keep(path, data))
            else:
                self._keep(path, data)
        self._watch("within")
        if delay_s:
            require_running().sleep(delay_s)
        if self.is_full:
            self._refuse()
        if is_refused:
            self._fail()

    def _keep(self, path: str, data: bytes) -> None:
        self.files[path] = self.written[path] = data
        self.damaged.pop(path, None)

    def damage(self, path: str, *, is_torn: bool, place: float) -> None:
        """Cut a file, or change one of its bytes. ``place`` is between 0 and 1."""
        data = self.files[path]
        self.damaged.setdefault(path, data)
        at = int(place * len(data))
        self.files[path] = data[:at] if is_torn else data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        self.has_damage = True

    def mend(self) -> bool:
        """Restore all damaged files from copies, as an operator would. Return True if there were any."""
        found = {path: data for path, data in self.damaged.items() if path in self.files}
        self.files.update(found)
        self.damaged.clear()
        return bool(found)

    def _delay_s(self) -> float:
        return self.slow_s + (self._chance.random() * self.delay_s if self.delay_s else 0.0)

    def _draws(self, chance: float) -> bool:
        return chance > 0 and self._chance.random() < chance

    def _maybe_fail(self) -> None:
        if self._draws(self.error_chance):
            self._fail()

    def _refuse(self) -> None:
        self.failure_count += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def _fail(self) -> None:
        self.failure_count += 1
        # s3fs turns the HTTP status 503 into EBUSY, and 500 into EREMOTEIO.
        raise OSError(*self._chance.choice([(errno.EBUSY, "Please reduce your request rate."), (errno.EREMOTEIO, "?")]))


class _Current:
    """Holds the store of the current seed."""

    store: Store | None = None


def set_store(store: Store | None) -> None:
    """Begin or end a seed."""
    _Current.store = store


def store() -> Store:
    """Return the store of the current seed."""
    assert _Current.store is not None, "no seed is running"
    return _Current.store


def _request() -> Store:
    """Make a request to the store.

    The simulation itself, which judges the files, waits for nothing. Nor do the threads of Arrow that read ahead.
    """
    scheduler = running()
    if scheduler is not None and scheduler.current is not None and get_ident() == main_thread().ident:
        store().request()
    return store()


class SimulatedFiles(AbstractFileSystem):  # type: ignore[misc]
    """The store, as the product's adapter uses it."""

    protocol = "simulated"
    cachable = False

    def find(self, path: str, *_: Any, detail: bool = False, **__: Any) -> Any:
        start = self._strip_protocol(path).rstrip("/") + "/"
        found = {
            name: {"name": name, "size": len(data), "type": "file"}
            for name, data in sorted(_request().files.items())
            if name.startswith(start)
        }
        return found if detail else list(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return {"name": path, "size": len(_content(path)), "type": "file"}

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        store().write(self._strip_protocol(rpath), Path(lpath).read_bytes())

    def rm_file(self, path: str) -> None:
        if _request().files.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    def _open(self, path: str, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO(_content(path))


def _content(path: str) -> bytes:
    files = _request().files
    if path not in files:
        raise FileNotFoundError(path)
    return files[path]


fsspec.register_implementation(SimulatedFiles.protocol, SimulatedFiles, clobber=True)
