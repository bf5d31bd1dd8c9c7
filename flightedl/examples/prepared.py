"""A directory of training data that is made once, however many trainers start at the same moment.

Theory of operation: whoever gets the lock file beside the directory writes everything into a ``.partial`` directory,
adds ``prepared.json`` (which kind of data this is) and renames it into place. The others wait for the lock and then
find the directory. A process that is killed loses the lock with its life, and the next one starts over and removes what
was left. So a directory that has its ``prepared.json`` is complete.

Not guaranteed: on a file system without locks (some network mounts) two processes may work at the same time; prepare
the data once before the job there.
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
    """The absolute path of ``directory``, filled by ``write`` unless it already is.

    Args:
        directory: Where the data shall be; its parents are made.
        kind: Name and version of the data's layout; another kind is refused, never overwritten.
        write: Writes all files into the directory that it is given.
        say: Tells the user, in one line, that another process is preparing.

    Raises:
        DataError: The directory holds something else, or cannot be written.
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
    """Whether the data is there; DataError when something else is."""
    try:
        mark = from_json((directory / _MARK).read_bytes(), _Mark)
    except FileNotFoundError:
        # It may have come into place since, whole: who has the lock finds it.
        if directory.is_dir() and any(directory.iterdir()) and not (directory / _MARK).exists():
            raise DataError(f"{directory} holds other files: name an empty or new directory with --data") from None
        return False
    except (NotADirectoryError, msgspec.DecodeError) as error:
        raise DataError(f"{directory} is not a directory that was prepared here: name another with --data") from error
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
    """Hold an exclusive lock on a file; it ends with the block or the process. Ctrl-C interrupts the wait."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
