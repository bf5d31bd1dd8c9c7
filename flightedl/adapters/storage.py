"""Files and Storage on fsspec: plain paths, ``file://``, ``memory://``, ``s3://``, and other installed protocols.

Rules:

* A file is published atomically. On the local file system, this means a temporary name in the same directory, fsync,
  rename, and fsync of the directory. For other file systems, the content is first collected in an unnamed temporary
  file on this machine, and uploaded when it is complete: leaving ``with fs.open(path, "wb")`` by an exception would
  commit a partial file.
* Listings never come from a cache. Correctness does not depend on conditional puts.
* S3's endpoint and credentials are taken from the standard variables (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``,
  ...). Because of time limits and few retries, a dead server becomes an error within seconds.
* Messages name files but never credentials: user, password and query are removed from URLs.

A failed publish may have had an effect, which is harmless because names are always new. A process that is killed during
a local write leaves behind a hidden temporary file, which ``list`` omits.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from flightedl.domain.retries import CREDENTIALS_ERRORS, is_transient
from flightedl.errors import CorruptError, DataError, FlightedlError, NotFoundError, UnavailableError, UsageError
from flightedl.ports import FileStat, StoredFile
from flightedl.process.importing import install_command

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0

_READ_BLOCK_BYTES = 16 << 20
#: Number of attempts to read a file that is being replaced.
_REPLACED_TRIES = 10
_TEMPORARY_END = ".partial"
#: Wildcards do not match file names that begin with one of these characters.
_NO_DATA = ("_", ".")
_MAGIC = re.compile(r"[*?\[]")
_S3_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for every process of the job"
_S3_OPTIONS: Mapping[str, Any] = {
    "config_kwargs": {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"max_attempts": 2, "mode": "standard"},
    },
}


def open_storage(url: str) -> FsspecStorage:
    """Return a storage whose root is ``url``.

    Raises:
        UsageError: the URL's protocol is unknown, or its package is not installed.
        UnavailableError: the URL's server is unreachable.
    """
    return FsspecStorage(url)


class FsspecStorage:
    """Implementation of ``ports.Storage``. Opens and creates nothing before the first call that needs it.

    Args:
        url: URL or plain path of a directory.
    """

    def __init__(self, url: str) -> None:
        self._fs, root = _file_system(url)
        self._root = root.rstrip("/")
        self._url = without_credentials(url).rstrip("/") or "/"
        self._is_local = isinstance(self._fs, LocalFileSystem)

    @property
    def url(self) -> str:
        return self._url

    def read(self, name: str) -> bytes:
        return self._read(name, 0, None)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        found = self._read(name, offset, length)
        if missing := length - len(found):
            raise CorruptError(f"{self._url}/{name} ends {missing} bytes before {offset + length}: it is truncated")
        return found

    def _read(self, name: str, offset: int, length: int | None) -> bytes:
        """Return up to ``length`` bytes of a single version of the file, or the entire file."""
        for _ in range(_REPLACED_TRIES):
            try:
                with self._explained(name), _opened(self._fs, self._path(name), **self._reading()) as file:
                    file.seek(offset)
                    return _read_blocks(file, length)
            except _ReplacedError:
                continue
        raise UnavailableError(f"{self._url}/{name} is replaced faster than it can be read: try again")

    def publish(
        self, name: str, parts: Iterable[bytes | memoryview], require: Callable[[], None] = lambda: None
    ) -> int:
        path = self._path(name)
        if self._is_local:
            return self._publish_locally(name, Path(path), parts, require)
        # The file has no name, so a killed process leaves nothing behind.
        with tempfile.TemporaryFile() as collected:
            size_bytes = self._write_all(name, collected, parts)
            collected.seek(0)
            require()
            with self._explained(name):
                if isinstance(self._fs, MemoryFileSystem):  # put_file shows the file while it is being written
                    self._fs.pipe_file(path, collected.read())
                else:
                    self._fs.put_file(f"/dev/fd/{collected.fileno()}", path)
        return size_bytes

    def _publish_locally(
        self, name: str, path: Path, parts: Iterable[bytes | memoryview], require: Callable[[], None]
    ) -> int:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{_TEMPORARY_END}")
        with self._explained(name):
            missing = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
            file = _opened_in_new_directory(temporary)
        try:
            with file:
                size_bytes = self._write_all(name, file, parts)
                with self._explained(name):
                    file.flush()
                    os.fsync(file.fileno())
            require()
            with self._explained(name):
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        with self._explained(name):
            # A new directory is durable only after its parent has been synced.
            for directory in (path.parent, *(parent.parent for parent in missing)):
                _sync_directory(directory)
        return size_bytes

    def _write_all(self, name: str, file: BinaryIO, parts: Iterable[bytes | memoryview]) -> int:
        """Write the parts. Errors raised while iterating over them are propagated unchanged."""
        size_bytes = 0
        for part in parts:
            with self._explained(name):
                file.write(part)
            size_bytes += len(part) if isinstance(part, bytes) else part.nbytes
        return size_bytes

    def list(self, prefix: str) -> tuple[StoredFile, ...]:
        parent = self._path(prefix.rpartition("/")[0])
        try:
            with self._explained(prefix):
                found: Mapping[str, Any] = self._fs.find(parent, detail=True)
        except NotFoundError:
            return ()
        start = self._root + "/"
        stored = (
            StoredFile(path.removeprefix(start), int(details["size"] or 0))
            for path, details in found.items()
            if path.startswith(start + prefix) and not _is_temporary(path)
        )
        return tuple(sorted(stored, key=lambda file: file.name))

    def delete(self, name: str) -> None:
        with contextlib.suppress(NotFoundError), self._explained(name):
            self._fs.rm_file(self._path(name))
            if self._is_local:
                self._remove_empty_directories(Path(self._path(name)))

    def _remove_empty_directories(self, path: Path) -> None:
        """Remove the directories that were created for a file if they are empty now."""
        root = Path(self._root)
        for directory in path.parents:
            if root not in (directory, *directory.parents):
                return
            try:
                directory.rmdir()
            except OSError:
                return

    def _path(self, name: str) -> str:
        if any(part in (".", "..") for part in name.split("/")) or name.startswith("/"):
            raise UsageError(f"{name!r} is not the name of a file under {self._url}")
        return f"{self._root}/{name}" if name else self._root

    def _reading(self) -> dict[str, Any]:
        """Return options that send one request per block, without reading ahead."""
        return {} if self._is_local else {"cache_type": "none"}

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        place = f"{self._url}/{name}"
        try:
            yield
        except FlightedlError:
            raise
        except FileNotFoundError:
            raise NotFoundError(f"there is no {place}") from None
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{place} cannot be created, because a file is where a directory should be") from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EBUSY:
                raise _ReplacedError from error
            if isinstance(error, PermissionError) or _lacks_credentials(error):
                raise UsageError(f"no access to {place}: {_reason(error)}; check the credentials and rights") from None
            raise UnavailableError(f"{place} cannot be used at the moment: {_reason(error)}") from error


class _ReplacedError(Exception):
    """s3fs reports EBUSY if the file was replaced during a read that took several requests."""


class _RangesOfIndices(AbstractFileSystem):  # type: ignore[misc]
    """The "files" of ``formats.indices``, whose URLs contain all the information."""

    protocol = "indexed"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return {"name": path, "size": 0, "type": "file", "ETag": "indices"}


fsspec.register_implementation(_RangesOfIndices.protocol, _RangesOfIndices, clobber=True)


class FsspecFiles:
    """Implementation of ``ports.Files``."""

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> tuple[FileStat, ...]:
        found: dict[str, FileStat] = {}
        for pattern in patterns:
            shown = without_credentials(pattern)
            with _as_data_error(shown):
                try:
                    stats = _expanded(pattern)
                except FileNotFoundError:
                    if not may_be_empty:
                        raise
                    stats = ()
            if not stats and not may_be_empty:
                raise DataError(f"no file matches {shown}: check the path or the pattern")
            found.update((stat.url, stat) for stat in stats)
        return tuple(found[url] for url in sorted(found))

    def stat(self, url: str) -> FileStat | None:
        with _as_data_error(without_credentials(url)):
            fs, path = _file_system(url)
            try:
                details = fs.info(path)
                return _stat(fs, path, details) if details["type"] == "file" else None
            except FileNotFoundError:
                return None

    def open(self, url: str) -> BinaryIO:
        with _as_data_error(without_credentials(url)):
            fs, path = _file_system(url)
            return _opened(fs, path)


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment. Return a plain path unchanged."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _file_system(url: str) -> tuple[Any, str]:
    protocol = fsspec.utils.get_protocol(url)
    options = _S3_OPTIONS if protocol in ("s3", "s3a") else {}
    if options and "@" in urlsplit(url).netloc:
        raise UsageError(
            f"{without_credentials(url)} must not contain credentials, because S3 ignores them: {_S3_CREDENTIALS}"
        )
    try:
        fs, path = url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        hint = install_command("s3") if protocol in ("s3", "s3a") else f"install its package ({error})"
        raise UsageError(f"{without_credentials(url)} needs a package that is not installed: {hint}") from None
    except ValueError as error:
        raise UsageError(
            f"{without_credentials(url)} cannot be opened: {error}; give a path, or a URL such as s3://bucket/name"
        ) from None
    except Exception as error:  # noqa: BLE001 - some connect when they are created, and raise their library's errors
        raise UnavailableError(f"{without_credentials(url)} cannot be reached: {_reason(error)}") from None
    return fs, path


def _opened(fs: Any, path: str, **options: Any) -> BinaryIO:
    """Open for reading. Readers in fsspec's memory file system share one file object, so each gets a copy."""
    if isinstance(fs, MemoryFileSystem):
        return io.BytesIO(fs.cat_file(path))
    return cast("BinaryIO", fs.open(path, "rb", **options))


def _opened_in_new_directory(path: Path) -> BinaryIO:
    """Open for writing. Create the directory if it is missing; a concurrent ``delete`` may remove it once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:  # Directories cannot be created everywhere, for example not below /proc.
        raise UsageError(f"the directory {path.parent} cannot be created: choose another place") from None
    try:
        return path.open("xb")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")


def _read_blocks(file: BinaryIO, length: int | None) -> bytes:
    blocks: list[bytes] = []
    missing = length
    while missing != 0:
        block = file.read(_READ_BLOCK_BYTES if missing is None else min(missing, _READ_BLOCK_BYTES))
        if not block:
            break
        blocks.append(block)
        missing = None if missing is None else missing - len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def _expanded(pattern: str) -> tuple[FileStat, ...]:
    fs, path = _file_system(pattern)
    if not _MAGIC.search(path) or (isinstance(fs, LocalFileSystem) and Path(path).is_file()):
        details = fs.info(path)
        if details["type"] == "directory":
            raise DataError(f"{without_credentials(pattern)} is a directory: name the files, as in {pattern}/*.parquet")
        return (_stat(fs, path, details),)
    found: Mapping[str, Any] = fs.glob(path, detail=True)
    marked = path.rpartition("/")[2].startswith(_NO_DATA)
    return tuple(
        _stat(fs, path, details)
        for path, details in found.items()
        if details["type"] == "file" and (marked or not path.rpartition("/")[2].startswith(_NO_DATA))
    )


def _stat(fs: Any, path: str, details: Mapping[str, Any]) -> FileStat:
    size_bytes = int(details["size"] or 0)
    if isinstance(fs, LocalFileSystem):
        return FileStat(path, size_bytes, f"{size_bytes}-{Path(path).stat().st_mtime_ns}")
    tag = details.get("ETag") or details.get("etag")
    if tag:
        version = str(tag).strip('"')
    else:
        changed = next((details[name] for name in ("mtime", "LastModified", "created") if details.get(name)), "")
        # Some file systems return a file's time as a number in listings, but as a date for a single file.
        instant = changed.timestamp() if hasattr(changed, "timestamp") else changed
        version = f"{size_bytes}-{instant}"
    return FileStat(fs.unstrip_protocol(path), size_bytes, version)


@contextlib.contextmanager
def _as_data_error(shown: str) -> Iterator[None]:
    try:
        yield
    except FlightedlError:
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file {shown}: check the path") from None
    except IsADirectoryError:
        raise DataError(f"{shown} is a directory: name the files, as in {shown}/*.parquet") from None
    except Exception as error:
        if isinstance(error, PermissionError) or _lacks_credentials(error):
            hint = "check the credentials and rights"
            if _lacks_credentials(error):
                hint = _S3_CREDENTIALS if shown.startswith("s3") else "give every process of the job credentials"
            raise DataError(f"no access to {shown}: {_reason(error)}; {hint}") from None
        if is_transient(error):
            raise UnavailableError(f"{shown} cannot be read at the moment: {_reason(error)}") from error
        raise DataError(f"{shown} cannot be read: {_reason(error)}") from error


def _is_temporary(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith(".") and name.endswith(_TEMPORARY_END)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lacks_credentials(error: Exception) -> bool:
    return type(error).__name__ in CREDENTIALS_ERRORS


def _reason(error: Exception) -> str:
    """Return a library's message as one line, without the query in a URL and without a final full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"://[^/\s@]*@", "://", re.sub(r"\?[^\s\"']*", "", text))[:300].rstrip(". ")
