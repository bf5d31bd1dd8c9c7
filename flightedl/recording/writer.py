"""Writes the events and effects of one process as lines of JSON.

The first line describes the process (``Header``). Every other line is an event of one of its cores (``Record``).
Recording never waits for the disk: a thread writes buffered lines several times per second. If the process is killed,
lines that are still in the buffer are lost.

Whatever happens to the recording, training continues. Recording *stops*, with one warning, if the disk is full or not
writable, the disk is so slow that the buffer is full, the file has reached its size limit, or a value cannot be
encoded. Events recorded until then can be replayed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from flightedl.errors import UsageError
from flightedl.ports import Clock
from flightedl.process import machine
from flightedl.recording.texts import text_without

_log = logging.getLogger(__name__)

FORMAT = 2
SUFFIX = ".recording.jsonl"
#: Limit of a process's file.
LIMIT_BYTES = 4 << 30
#: Limit of the buffer.
_KEPT_BYTES = 64 << 20
_EVERY_S = 0.2
#: Minimum length, in characters, of a string that is hidden.
_HIDDEN_FROM = 8
#: Number of hidden strings that a core remembers.
_HIDDEN_COUNT = 64
_CLOSE_S = 10.0


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a recording."""

    format: int
    #: Version of flightedl.
    version: str
    #: Kind of the process: master, pserver or trainer.
    process: str
    #: Name of the process. It is unique among processes of its kind.
    name: str
    job: str
    #: Time at which the recording started, in seconds since 1970.
    wall_s: float
    #: The same time on the process's monotonic clock.
    clock_s: float


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of one of the process's cores."""

    #: Time in seconds, by the process's own clock.
    at: float
    #: Kind and number of the core, for example "feed-2".
    core: str
    event: Any
    effects: Sequence[Any] = ()
    #: Class of the error that the event raised; empty if it raised none.
    raised: str = ""


def _in_json(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def _warn(why: str) -> None:
    _log.warning("recording has stopped, training continues: %s", why)


class BackgroundFile:
    """A file to which a background thread writes. Thread-safe.

    Args:
        path: Path of the file, which must not exist.
        limit_bytes: Maximum size of the file.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._file = path.open("xb", buffering=0)
        self._room = limit_bytes
        self._lock = threading.Lock()
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._is_stopped = False
        #: True once the last lines were taken from the buffer.
        self._is_closed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flightedl-recording", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> bool:
        """Append a line to the buffer without waiting. False if writing has stopped."""
        with self._lock:
            if self._is_stopped or self._is_closed:
                return False
            self._kept.append(line)
            self._kept_bytes += len(line)
            self._room -= len(line)
            is_too_slow = self._kept_bytes > _KEPT_BYTES
        if is_too_slow:
            self._stop("the disk is too slow")
        return not is_too_slow

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _stop(self, why: str) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            self._kept, self._kept_bytes = [], 0
        _warn(why)

    def _run(self) -> None:
        with self._file:
            while not (self._is_closed or self._is_stopped):
                self._write_kept(is_last=self._closing.wait(_EVERY_S))

    def _write_kept(self, *, is_last: bool) -> None:
        with self._lock:
            self._is_closed = is_last
            data = b"".join(self._kept)
            self._kept, self._kept_bytes = [], 0
            is_full = self._room < 0
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._stop(f"{type(error).__name__}: {os.strerror(error.errno or 0)}")
        if is_full:
            self._stop("the file has reached its limit")


class CoreRecorder:
    """Recorder of one core.

    Args:
        recorder: Recorder of the process.
        name: Name of the core within the process.
    """

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.name = name
        #: Hidden string -> its replacement, as JSON. If there are too many, the oldest is dropped.
        self._hidden: dict[bytes, bytes] = {}
        #: Hidden string -> its replacement, for those that are never dropped.
        self._kept: dict[bytes, bytes] = {}

    def hidden(self, text: str) -> str:
        """Return the replacement of a string that may contain paths. Later records of this core use it too."""
        if len(text) < _HIDDEN_FROM:
            return text
        shown = text_without(text)
        if shown != text:
            if len(self._hidden) >= _HIDDEN_COUNT:
                del self._hidden[next(iter(self._hidden))]
            self._hidden[_in_json(text)] = _in_json(shown)
        return shown

    def keep_hidden(self) -> None:
        """Keep all current replacements permanently."""
        self._kept, self._hidden = self._hidden, {}

    def without_hidden(self, line: bytes) -> bytes:
        """Return a line in which all hidden strings are replaced."""
        # Replace the strings in ``_hidden`` first, because they may contain strings in ``_kept``.
        for hidden in (self._hidden, self._kept):
            for text, shown in hidden.items():
                line = line.replace(text, shown)
        return line

    def now(self) -> float:
        return self._recorder.now()

    def record(self, at: float, event: object, effects: Sequence[object] = ()) -> None:
        self._recorder.write(at, self, event, effects, "")

    def raised(self, at: float, event: object, error: BaseException) -> None:
        """Record an event that changed nothing, because it raised an error."""
        self._recorder.write(at, self, event, (), type(error).__name__)


class Recorder:
    """Recorder of one process. Thread-safe, provided that each core handles one event at a time.

    Args:
        process: Kind of the process: master, pserver or trainer.
        name: Name of the process, unique within its kind.
        job: The job's name.
        clock: The clock that the cores use.
        write: Writes a line; returns False if it accepts no more lines.
        is_strict: True to raise an error if a value cannot be encoded, False to stop recording.
    """

    def __init__(
        self,
        process: str,
        name: str,
        job: str,
        clock: Clock,
        write: Callable[[bytes], object],
        *,
        is_strict: bool = False,
    ) -> None:
        # Imported lazily: processes that record nothing should not import the value classes of all processes.
        from flightedl.recording.values import encode, written

        self._encode, self._written = encode, written
        self._write = write
        self._clock = clock
        self._is_strict = is_strict
        self._is_on = True
        self._numbers: Counter[str] = Counter()
        version = metadata.version("flightedl")
        header = Header(
            format=FORMAT,
            version=version,
            process=process,
            name=name,
            job=job,
            wall_s=clock.wall_time(),
            clock_s=clock.now(),
        )
        write(encode(header) + b"\n")

    def now(self) -> float:
        """Return the current time, for inputs that have no parameter ``now``."""
        return self._clock.now()

    def core(self, kind: str) -> CoreRecorder:
        """Return a recorder for another core of this kind."""
        self._numbers[kind] += 1
        return CoreRecorder(self, f"{kind}-{self._numbers[kind]}")

    def write(self, at: float, core: CoreRecorder, event: object, effects: Sequence[object], raised: str) -> None:
        """Write a record, see ``CoreRecorder``."""
        if not self._is_on:
            return
        try:
            line = self._encode(
                Record(
                    at=at,
                    core=core.name,
                    event=self._written(event),
                    effects=[self._written(effect) for effect in effects],
                    raised=raised,
                )
            )
        except Exception as error:
            if self._is_strict:
                raise
            self._is_on = False
            _warn(f"{type(error).__name__}: {error}")
        else:
            self._is_on = self._write(core.without_hidden(line) + b"\n") is not False


@contextlib.contextmanager
def recording_process(directory: str, process: str, job: str, clock: Clock) -> Iterator[Recorder | None]:
    """Record the current process during the ``with`` block. Yields None if the process is not recorded.

    Args:
        directory: Directory of the file, which is created; empty to record nothing.
        process: Kind of the process: master, pserver or trainer.
        job: The job's name.
        clock: The clock that the cores use.

    Raises:
        UsageError: The file cannot be created.
    """
    if not directory:
        yield None
        return
    name = f"{clock.wall_time():.3f}-{machine.process_id()}"
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory) / f"{process}-{name}{SUFFIX}"
        file = BackgroundFile(path)
    except OSError as error:
        raise UsageError(f"cannot write a recording to {directory}: {os.strerror(error.errno or 0)}") from None
    with contextlib.closing(file):
        yield Recorder(process, name, job, clock, file.write)
