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
import io
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from flightedl.adapters.listing import Found, Matches, list_local, list_remote
from flightedl.domain.data_urls import (
    as_declared,
    cache_and_target,
    has_wildcard,
    is_below,
    literal,
    matcher,
    moved,
    without_credentials,
    without_query,
)
from flightedl.domain.retries import CREDENTIALS_ERRORS, is_transient, machine_error
from flightedl.domain.topics import is_topic
from flightedl.errors import (
    CorruptError,
    DataError,
    FlightedlError,
    NotFoundError,
    StoreError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from flightedl.ports import FileListing, FileStat, StoredFile
from flightedl.process.importing import install_command

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0

_READ_BLOCK_BYTES = 16 << 20
#: Number of attempts to read a file that is being replaced.
_REPLACED_TRIES = 10
_TEMPORARY_END = ".partial"
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
        self.url = without_credentials(url).rstrip("/") or "/"
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def read(self, name: str) -> bytes:
        return self._read(name, 0, None)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        found = self._read(name, offset, length)
        if missing := length - len(found):
            raise CorruptError(f"{self.url}/{name} ends {missing} bytes before {offset + length}: it is truncated")
        return found

    def _read(self, name: str, offset: int, length: int | None) -> bytes:
        """Return up to ``length`` bytes of a single version of the file, or the entire file."""
        # One request per block, without reading ahead.
        options = {} if self._is_local else {"cache_type": "none"}
        for _ in range(_REPLACED_TRIES):
            try:
                with self._explained(name), _opened(self._fs, self._path(name), **options) as file:
                    file.seek(offset)
                    return _read_blocks(file, length)
            except _ReplacedError:
                continue
        raise UnavailableError(f"{self.url}/{name} is replaced faster than it can be read: try again")

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
            with contextlib.suppress(OSError):  # The first error says what is wrong.
                temporary.unlink()
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
            raise UsageError(f"{name!r} is not the name of a file under {self.url}")
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        place = f"{self.url}/{name}"
        try:
            yield
        except FlightedlError:
            raise
        except FileNotFoundError:
            raise NotFoundError(f"there is no {place}") from None
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{place} cannot be created, because a file is where a directory should be") from None
        except Exception as error:
            if type(error).__name__ == "FileExpired":
                raise _ReplacedError from error
            if isinstance(error, PermissionError) or _lacks_credentials(error):
                raise StoreError(f"no access to {place}: {_reason(error)}; check the credentials and rights") from None
            if (lacking := machine_error(error, f"{place} cannot be used")) is not None:
                raise lacking from error
            raise UnavailableError(f"{place} cannot be used at the moment: {_reason(error)}") from error


class _ReplacedError(Exception):
    """s3fs raises FileExpired if the file was replaced during a read that took several requests."""


class _RangesOfIndices(AbstractFileSystem):  # type: ignore[misc]
    """The "files" of ``formats.indices``, whose URLs contain all the information."""

    protocol = "indexed"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return {"name": path, "size": 0, "type": "file", "ETag": "indices"}


fsspec.register_implementation("kafka", "flightedl.adapters.kafka.Topics", clobber=True)
fsspec.register_implementation(_RangesOfIndices.protocol, _RangesOfIndices, clobber=True)


class FsspecFiles:
    """Implementation of ``ports.Files``.

    Args:
        moved: Folder -> its new place.
        least_retention_s: Seconds for which Kafka topics should keep their messages.
    """

    def __init__(self, moved: Mapping[str, str] | None = None, least_retention_s: float = 0.0) -> None:
        self._least_retention_s = least_retention_s
        #: Declared URL or pattern -> its query. Only this process knows the queries, which may be secrets.
        self._queries: dict[str, str] = {}
        self._moved = dict(moved or {})

    def declare(self, urls: Sequence[str], moved: Mapping[str, str] | None = None) -> None:
        self._moved.update(moved or {})
        for url in urls:
            if query := url[len(without_query(url)) :]:
                self._queries[cache_and_target(without_query(url))[1]] = query

    def expand(self, patterns: Sequence[str], *, may_be_empty: bool = False) -> FileListing:
        self.declare(patterns)
        matches = Matches()
        for pattern in map(without_query, patterns):
            shown = without_credentials(pattern)
            count = 0
            with _as_data_error(shown):
                try:
                    for identity, stat in self._matching(pattern, matches):
                        if not (stat.version or may_be_empty):
                            raise DataError(f"{stat.url} is a link without a target: restore the target, or remove it")
                        matches.add(identity, stat)
                        count += 1
                except FileNotFoundError:
                    if not may_be_empty:
                        raise
            if not count and not may_be_empty:
                missing = "no file matches" if has_wildcard(pattern) else "there is no file"
                why = f" ({'; '.join(left_out)})" if (left_out := matches.sentences()) else ""
                raise DataError(f"{missing} {shown}: check the path{' or the pattern'}{why}")
        return matches.listing()

    def _matching(self, pattern: str, matches: Matches) -> Iterator[Found]:
        """Yield the files that match a pattern without its query, with the URLs under which they were declared."""
        caches, target = cache_and_target(pattern)
        is_pattern = has_wildcard(target)
        place = moved(target, self._moved) if is_pattern else self._place(literal(target))
        fs, path = _file_system(place)
        if is_topic(target):
            path, is_pattern, fs.least_retention_s = f"{path}/*", True, self._least_retention_s
        if isinstance(fs, LocalFileSystem):
            found = list_local(path + "/" * place.endswith("/"), matches.leave_out)
        else:
            found = list_remote(fs, path, matches.leave_out, _stat, is_pattern=is_pattern)
        for identity, stat in found:
            yield identity, self._as_declared(stat, caches, target)

    def stat(self, url: str) -> FileStat | None:
        with _as_data_error(without_credentials(url)):
            caches, target = cache_and_target(url)  # The version must not depend on what has been cached.
            fs, path = _file_system(self._place(target))
            try:
                details = fs.info(path)
            except FileNotFoundError:
                return None
            if details["type"] != "file":
                return None
            return self._as_declared(_stat(fs, path, details), caches, target)

    def open(self, url: str) -> BinaryIO:
        with _as_data_error(without_credentials(url)):
            caches, target = cache_and_target(url)
            fs, path = _file_system(caches + self._place(target))
            return _opened(fs, path)

    def _place(self, url: str) -> str:
        """Return the URL that this process opens for a declared one: with its query, and below its new folder."""
        query = self._queries.get(url)
        if query is None:
            patterns = (known for known in self._queries if has_wildcard(known) and matcher(known).fullmatch(url))
            query = next((self._queries[known] for known in patterns), "")
        return moved(url, self._moved) + query

    def _as_declared(self, stat: FileStat, caches: str, target: str) -> FileStat:
        """Return the file with the URL that other processes know, given the declared URL or pattern."""
        _, link, container = target.partition("::")
        url = as_declared(stat.url, self._moved)
        is_copy = any(is_below(url, folder) for folder in self._moved)
        return replace(stat, url=caches + url + link + container, is_copy=is_copy)


def _file_system(url: str) -> tuple[Any, str]:
    if url.startswith("/") and "::" not in url:
        # The result of ``url_to_fs``, which parses URLs in 0.1 ms.
        return LocalFileSystem(use_listings_cache=False), LocalFileSystem._strip_protocol(url)  # noqa: SLF001
    protocol = fsspec.utils.get_protocol(url)
    options = _S3_OPTIONS if protocol in ("s3", "s3a") else {}
    if options and "@" in urlsplit(url).netloc:
        raise UsageError(
            f"{without_credentials(url)} must not contain credentials, because S3 ignores them: {_S3_CREDENTIALS}"
        )
    try:
        fs, path = url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "kafka": "kafka"}.get(protocol)
        hint = install_command(extra) if extra else f"install its package ({error})"
        raise UnsupportedError(f"{without_credentials(url)} needs a package that is not installed: {hint}") from None
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
    if isinstance(fs, LocalFileSystem) and not options:
        return Path(path).open("rb")
    return cast("BinaryIO", fs.open(path, "rb", **options))


def _opened_in_new_directory(path: Path) -> BinaryIO:
    """Open for writing. Create the directory if it is missing; a concurrent ``delete`` may remove it once."""
    with contextlib.suppress(FileNotFoundError):
        return _created(path)
    try:
        return _created(path)
    except FileNotFoundError:  # Files cannot be created everywhere, for example not below /proc.
        raise UsageError(f"no file can be created in {path.parent}: choose another place to write to") from None


def _created(path: Path) -> BinaryIO:
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
        raise StoreError(f"there is no file {shown}: check the path") from None
    except IsADirectoryError:
        raise DataError(f"{shown} is a directory: name the files, as in {shown}/*.parquet") from None
    except Exception as error:
        if isinstance(error, PermissionError) or _lacks_credentials(error):
            hint = "check the credentials and rights"
            if _lacks_credentials(error):
                hint = _S3_CREDENTIALS if shown.startswith("s3") else "give every process of the job credentials"
            raise StoreError(f"no access to {shown}: {_reason(error)}; {hint}") from None
        if (lacking := machine_error(error, f"{shown} cannot be read")) is not None:
            raise lacking from error
        if is_transient(error):
            raise UnavailableError(f"{shown} cannot be read at the moment: {_reason(error)}") from error
        raise StoreError(f"{shown} cannot be read: {_reason(error)}") from error


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
