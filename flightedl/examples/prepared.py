"""A directory of training data that is prepared once, even if many trainers start at the same time.

The process that locks the file next to the directory writes everything into a ``.partial`` directory, adds
``prepared.json``, which names the kind of data, and renames the directory to its final name. The other processes wait
for the lock and then find the directory. If the writing process is killed, its lock is released; the next process
removes the incomplete files and starts over. So a directory with a ``prepared.json`` is complete.

Limitation: on a file system without locks, such as some network mounts, several processes may prepare the data at once.
In that case, prepare it before the job starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from flightedl.errors import DataError
from flightedl.messages.decoding import from_json

_MARK = "prepared.json"


class _Mark(msgspec.Struct):
    kind: str


def prepared_directory(directory: Path, kind: str, write: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """Return the absolute path of ``directory``. If it is not complete, ``write`` fills it first.

    Args:
        directory: Directory of the data; missing parents are created.
        kind: Name and version of the data's layout. Data of another kind is rejected, never overwritten.
        write: Function that writes all files into a directory.
        say: Tells the user that another process is preparing the data.

    Raises:
        DataError: The directory holds other data or cannot be written.
    """
    directory = directory.absolute()
    try:
        if _is_complete(directory, kind):
            return directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.parent / f".{directory.name}.lock", lambda: say(f"waiting for {directory}")):
            if not _is_complete(directory, kind):
                _make(directory, kind, write)
    except OSError as error:
        raise DataError(f"cannot prepare {directory} ({error.strerror or error}): name another with --data") from error
    return directory


def _is_complete(directory: Path, kind: str) -> bool:
    """True if the data is complete. Raises DataError if the directory contains other data."""
    try:
        mark = from_json((directory / _MARK).read_bytes(), _Mark)
    except FileNotFoundError:
        # Check again under the lock, because another process may just have completed the directory.
        if directory.is_dir() and any(directory.iterdir()) and not (directory / _MARK).exists():
            raise DataError(f"{directory} holds other files: name an empty or new directory with --data") from None
        return False
    except (NotADirectoryError, msgspec.DecodeError) as error:
        raise DataError(f"{directory} is not a directory of prepared data: name another with --data") from error
    if mark.kind != kind:
        raise DataError(f"{directory} holds {mark.kind}, not {kind}: delete it, or name another with --data")
    return True


def _make(directory: Path, kind: str, write: Callable[[Path], None]) -> None:
    prefix = f".{directory.name}.partial-"
    for left in directory.parent.glob(f"{prefix}*"):
        shutil.rmtree(left)
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=prefix))
    try:
        write(partial)
        (partial / _MARK).write_bytes(msgspec.json.encode(_Mark(kind)))
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        partial.chmod(0o755)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file until the block or the process ends. Ctrl-C interrupts the wait."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
