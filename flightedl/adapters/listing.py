"""List the files that patterns match, with the semantics of ``ls``.

Rules:

* Links to files and folders are followed. In a path, each real folder occurs only once, so links in a loop end.
* Names of the same file are one file, which has the first of these names. Local files are the same if device and inode
  are equal; other files if their normalized URLs and versions are.
* A link whose target is missing is listed as a file of version "".
* Every other matching name that is not listed is counted, with the reason.
"""

from __future__ import annotations

import errno
import stat as modes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flightedl.domain.data_urls import (
    fixed_parts,
    has_wildcard,
    literal,
    matcher,
    normalized,
    without_credentials,
    without_query,
)
from flightedl.errors import DataError
from flightedl.ports import FileListing, FileStat

_HIDDEN = "a name that a wildcard matches begins with _ or ."
_SAME = "the same file is listed already"
_FOLDER = "it is a folder"
_SPECIAL = "it is neither a file nor a folder"
_LOOP = "it is a link to a folder above it"
#: Stands for the mode of a link without a target. `os.stat` never returns it.
_BROKEN = modes.S_IFLNK

#: Takes the reason why a name is left out, and the name.
LeaveOut = Callable[[str, str], None]
#: A file, and its identity. Names of the same file have equal identities.
Found = tuple[object, FileStat]


class Matches:
    """Collects the files that match patterns, and the names that are left out."""

    def __init__(self) -> None:
        self._found: list[Found] = []
        self._left_out: dict[str, list[str]] = {}

    def add(self, identity: object, stat: FileStat) -> None:
        self._found.append((identity, stat))

    def leave_out(self, reason: str, name: str) -> None:
        self._left_out.setdefault(reason, []).append(without_credentials(name))

    def listing(self) -> FileListing:
        """Return the files, sorted by URL, each under one name."""
        files: dict[object, FileStat] = {}
        for identity, stat in sorted(self._found, key=lambda found: found[1].url):
            if files.setdefault(identity, stat) is not stat:
                self.leave_out(_SAME, stat.url)
        return FileListing(files.values(), self.sentences())

    def sentences(self) -> list[str]:
        """Return one sentence per reason for leaving out names."""
        return [
            f"{names[0]} is left out: {reason}"
            if len(names) == 1
            else f"{len(names):,} matching names are left out, such as {min(names)}: {reason}"
            for reason, names in self._left_out.items()
        ]


def list_local(pattern: str, leave_out: LeaveOut) -> Iterator[Found]:
    """Yield the local files that match a path or pattern.

    Raises:
        DataError: a name is not UTF-8, or the pattern ends with a slash.
        OSError: a folder cannot be listed, or the path is a folder.
    """
    if pattern.endswith("/"):
        raise DataError(f"{pattern} names folders: name the files, as in {pattern}*.parquet")
    if Path(pattern).is_file():  # Its name may contain wildcard characters.
        yield _local(pattern, pattern.rpartition("/")[2])
        return
    base = fixed_parts(pattern)
    for path in _walked("/".join(base), pattern.split("/")[len(base) :], leave_out, ()):
        yield _local(path, "/".join(path.split("/")[len(base) :]))


def _local(path: str, name: str) -> Found:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DataError(f"the name {path!r} is not UTF-8: rename the file") from None
    try:
        found = Path(path).stat()
    except OSError:
        return path, FileStat(path, 0, "", name)
    return (found.st_dev, found.st_ino), FileStat(path, found.st_size, f"{found.st_size}-{found.st_mtime_ns}", name)


def _walked(folder: str, parts: list[str], leave_out: LeaveOut, above: tuple[object, ...]) -> Iterator[str]:
    """Yield the paths of files and broken links that match the components ``parts`` below a folder."""
    try:
        status = Path(folder or "/").stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    here = (status.st_dev, status.st_ino)
    if here in above:
        leave_out(_LOOP, folder)
    elif modes.S_ISDIR(status.st_mode):
        yield from _matching(folder, parts, leave_out, (*above, here))


def _matching(
    folder: str, parts: list[str], leave_out: LeaveOut, above: tuple[object, ...], *, is_in_stars: bool = False
) -> Iterator[str]:
    part, rest = parts[0], parts[1:]
    is_stars = part == "**"
    if is_stars:
        yield from _matching(folder, rest or ["*"], leave_out, above, is_in_stars=True)
    names = sorted(entry.name for entry in Path(folder or "/").iterdir()) if has_wildcard(part) else [literal(part)]
    shown, every = (matcher("*" if is_stars else part, is_hidden_matched=hidden) for hidden in (False, True))
    for name in filter(every.fullmatch, names):
        path = f"{folder}/{name}"
        mode = _mode(path)
        if mode is None or (is_stars and not modes.S_ISDIR(mode)):
            continue
        if not shown.fullmatch(name):
            if not (is_in_stars and modes.S_ISDIR(mode)):  # The component before it has counted the folder.
                leave_out(_HIDDEN, path)
        elif modes.S_ISDIR(mode) and (is_stars or rest):
            yield from _walked(path, parts if is_stars else rest, leave_out, above)
        elif mode == _BROKEN or (modes.S_ISREG(mode) and not rest):
            yield path
        elif modes.S_ISDIR(mode) and not has_wildcard(part):
            raise IsADirectoryError(path)
        elif not rest and not (is_in_stars and modes.S_ISDIR(mode)):
            leave_out(_FOLDER if modes.S_ISDIR(mode) else _SPECIAL, path)


def _mode(path: str) -> int | None:
    """Return the mode of the file that a path leads to, ``_BROKEN`` for a link without a target, or None if missing."""
    try:
        return Path(path).stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return _BROKEN if Path(path).is_symlink() else None


def list_remote(
    fs: Any,
    pattern: str,
    leave_out: LeaveOut,
    stat_of: Callable[[Any, str, Mapping[str, Any]], FileStat],
    *,
    is_pattern: bool,
) -> Iterator[Found]:
    """Yield the files of another file system that match a path or pattern.

    Raises:
        IsADirectoryError: the path is a folder.
        Exception: errors of the file system.
    """
    found = fs.glob(pattern, detail=True) if is_pattern else {pattern: fs.info(pattern)}
    below = len(fixed_parts(without_query(pattern)))
    for path, details in found.items():
        if details["type"] == "directory":
            if not is_pattern:
                raise IsADirectoryError(path)
            if "**" not in pattern:
                leave_out(_FOLDER, path)
        elif details["type"] != "file":
            leave_out(_SPECIAL, path)
        elif is_pattern and not matcher(pattern).fullmatch(path):
            leave_out(_HIDDEN, path)
        else:
            stat = stat_of(fs, path, details)
            name = "/".join(without_query(path).split("/")[below:])
            yield (normalized(stat.url), stat.version), replace(stat, name=name)
