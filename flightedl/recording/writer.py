"""Writes the events of one process, and their effects, as lines of JSON.

The first line says what process it is (``Header``), each other one what happened to one of its cores (``Record``).
Nobody waits for the disk: lines are kept in memory, and a thread writes them a few times a second. What kills the
process costs what was not written by then.

Training goes on whatever happens to a recording. It *stops*, with one warning, when the disk is full or cannot be
written, when the disk is so slow that too much is kept in memory, when the file has reached its limit, and when a value
cannot be written. What was recorded before can be replayed.
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
from flightedl.recording.texts import text_without

_log = logging.getLogger(__name__)

FORMAT = 2
SUFFIX = ".recording.jsonl"
#: Of one process.
LIMIT_BYTES = 4 << 30
#: What is kept in memory at most.
_KEPT_BYTES = 64 << 20
_EVERY_S = 0.2
#: Shorter texts name nothing; a core remembers so many.
_HIDDEN_FROM = 8
_HIDDEN_COUNT = 64
_CLOSE_S = 10.0


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a recording."""

    format: int
    #: Of flightedl.
    version: str
    #: master, pserver or trainer.
    process: str
    #: Tells one process from another of its kind.
    name: str
    job: str
    #: Seconds since 1970 and of the process's own clock, at the same instant.
    wall_s: float
    clock_s: float


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened to a core of the process."""

    #: On the process's own clock, in seconds.
    at: float
    #: Kind and number of the core, such as "feed-2".
    core: str
    event: Any
    effects: Sequence[Any] = ()
    #: The class of the error that it raised.
    raised: str = ""


def _in_json(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def _warn(why: str) -> None:
    _log.warning("recording has stopped, and training goes on: %s", why)


class BackgroundFile:
    """A file that a thread writes. Thread-safe.

    Args:
        path: Is made.
        limit_bytes: The file gets no larger.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._file = path.open("xb", buffering=0)
        self._room = limit_bytes
        self._lock = threading.Lock()
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._is_stopped = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flightedl-recording", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> bool:
        """Write this after all before it; does not wait. False: nothing is written any more."""
        with self._lock:
            if self._is_stopped:
                return False
            self._kept.append(line)
            self._kept_bytes += len(line)
            self._room -= len(line)
            is_too_slow = self._kept_bytes > _KEPT_BYTES
        if is_too_slow:
            self._stop("the disk is too slow")
        return not is_too_slow

    def close(self) -> None:
        """Write what is kept, and no more."""
        self._closing.set()
        self._thread.join(_CLOSE_S)
        with self._lock:
            self._is_stopped = True

    def _stop(self, why: str) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            self._kept, self._kept_bytes = [], 0
        _warn(why)

    def _run(self) -> None:
        with self._file:
            is_last = False
            while not (is_last or self._is_stopped):
                is_last = self._closing.wait(_EVERY_S)
                self._write_kept()

    def _write_kept(self) -> None:
        with self._lock:
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
    """Records one core.

    Args:
        recorder: Of the process.
        name: Of the core within it.
    """

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.name = name
        #: Texts, as JSON, and what is written in their place; and those of them that are never forgotten.
        self._hidden: dict[bytes, bytes] = {}
        self._kept: dict[bytes, bytes] = {}

    def hidden(self, text: str) -> str:
        """Return the text that stands for one that may name places, here and in what this core says from now on."""
        if len(text) < _HIDDEN_FROM:
            return text
        shown = text_without(text)
        if shown != text:
            if len(self._hidden) >= _HIDDEN_COUNT:
                del self._hidden[next(iter(self._hidden))]
            self._hidden[_in_json(text)] = _in_json(shown)
        return shown

    def keep_hidden(self) -> None:
        """Never forget the texts that are hidden by now."""
        self._kept, self._hidden = self._hidden, {}

    def without_hidden(self, line: bytes) -> bytes:
        """Return a line with the texts that stand for hidden ones."""
        # A text that is kept may be a part of another one, which has to go first.
        for hidden in (self._hidden, self._kept):
            for text, shown in hidden.items():
                line = line.replace(text, shown)
        return line

    def now(self) -> float:
        """As of ``Recorder``."""
        return self._recorder.now()

    def record(self, at: float, event: object, effects: Sequence[object] = ()) -> None:
        """An event, and what came of it."""
        self._recorder.write(at, self, event, effects, "")

    def raised(self, at: float, event: object, error: BaseException) -> None:
        """An event that raised, and changed nothing."""
        self._recorder.write(at, self, event, (), type(error).__name__)


class Recorder:
    """Records the cores of one process. Thread-safe; the events of one core come one after the other.

    Args:
        process: master, pserver or trainer.
        name: Tells it from others of its kind.
        job: The job's name.
        clock: The one that the cores are told.
        write: Takes lines; False: it takes no more.
        is_strict: Whether a value that cannot be written is an error, and not the end of the recording.
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
        # Imported lazily: it knows the values of all processes, and most processes record nothing.
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
        """The instant, for cores that are not told it."""
        return self._clock.now()

    def core(self, kind: str) -> CoreRecorder:
        """Record one more core of a kind."""
        self._numbers[kind] += 1
        return CoreRecorder(self, f"{kind}-{self._numbers[kind]}")

    def write(self, at: float, core: CoreRecorder, event: object, effects: Sequence[object], raised: str) -> None:
        """A line; see ``CoreRecorder``."""
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
    """Records a real process while this lasts; None: it is not to be recorded.

    Args:
        directory: Where the file goes, which is made; empty: nothing is recorded.
        process: master, pserver or trainer.
        job: The job's name.
        clock: The one that the cores are told.

    Raises:
        UsageError: the file cannot be made.
    """
    if not directory:
        yield None
        return
    name = f"{clock.wall_time():.3f}-{os.getpid()}"
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        path = Path(directory) / f"{process}-{name}{SUFFIX}"
        file = BackgroundFile(path)
    except OSError as error:
        raise UsageError(f"nothing can be recorded in {directory}: {os.strerror(error.errno or 0)}") from None
    with contextlib.closing(file):
        yield Recorder(process, name, job, clock, file.write)
