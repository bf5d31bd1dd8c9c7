"""A dataset that grows: which files are taken when, and when there are no more to come.

Rules:

* Whoever follows looks again and again. A file is *taken* when two looks in a row find it with the same size and
  version, so a file that is being written is left alone until its writer is through with it.
* A file named ``_END`` in the directory that a pattern names (the deepest part of it without a wildcard) says that
  there is nothing to come: what is there then is taken at once, and the dataset is *complete*. Where several patterns
  are followed, each directory needs one.
* Names that begin with ``_`` or ``.`` are never data.
* What was taken stays: files in the order in which they were taken (by name, within one look), for good. A file that
  is gone or has changed afterwards is *trouble*, told as long as it lasts; so is one that was refused, until it
  changes.
* A file that the store cannot read at the moment is read again at later looks. Once nothing is to come, it is refused
  when it has been unreadable for as long as ``retries.PATIENT`` allows. A complete dataset names what it was refused.

Pure: no clock, no I/O.

Not guaranteed: that a writer which pauses for longer than a look is noticed. Writers should write under a name that no
pattern matches and rename, as Hadoop, Spark and rsync do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flightedl.domain.retries import PATIENT, is_transient
from flightedl.ports import FileStat

MARKER = "_END"
#: Files, and bytes of their names, taken at one look at most: what is taken is one value in etcd.
TAKEN_LIMIT = 1000
TAKEN_LIMIT_BYTES = 200_000

_MAGIC = re.compile(r"[*?\[]")


def marker_urls(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the URLs of the patterns' end markers, each once."""
    found: dict[str, None] = {}
    for pattern in patterns:
        magic = _MAGIC.search(pattern)
        fixed = pattern if magic is None else pattern[: magic.start()]
        directory = fixed.rpartition("/")[0]
        found[f"{directory}/{MARKER}" if directory or fixed.startswith("/") else MARKER] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of one look at the files."""

    #: To be indexed, and then told by ``took`` or ``refuse``.
    stable: tuple[FileStat, ...]
    #: There is more that is stable: look again at once.
    has_more: bool
    #: Nothing is to come, and everything that is there was taken or refused.
    is_complete: bool


class DirectoryFollower:
    """Knowledge about the files of one growing dataset. Not thread-safe.

    Args:
        taken: Those that were taken before, in order.
    """

    def __init__(self, taken: Iterable[FileStat] = ()) -> None:
        self._taken = {stat.url: stat for stat in taken}
        #: Seen once, or changed since they were seen.
        self._unstable: dict[str, FileStat] = {}
        self._refused: dict[str, tuple[FileStat, str]] = {}
        #: Files that could not be read at the moment: since when, and why.
        self._unreadable: dict[str, tuple[float, str]] = {}
        self._is_marked = False
        self._lost: list[str] = []

    def look(self, found: Sequence[FileStat], *, is_marked: bool) -> Scan:
        """Take note of what is there; ``is_marked`` was found out before ``found`` was."""
        self._is_marked = is_marked
        there = {stat.url: stat for stat in found}
        self._lost = [
            f"{url} {'is gone' if url not in there else 'has changed'} since it was taken into the dataset"
            for url, stat in self._taken.items()
            if there.get(url) != stat
        ]
        self._refused = {url: refused for url, refused in self._refused.items() if url in there}
        self._unreadable = {url: failed for url, failed in self._unreadable.items() if url in there}
        new = {url: stat for url, stat in sorted(there.items()) if self._is_new(stat)}
        stable = [stat for url, stat in new.items() if is_marked or self._unstable.get(url) == stat]
        taken: list[FileStat] = []
        size_bytes = 0
        for stat in stable[:TAKEN_LIMIT]:
            size_bytes += len(stat.url.encode()) + len(stat.version) + 50
            if taken and size_bytes > TAKEN_LIMIT_BYTES:
                break
            taken.append(stat)
        self._unstable = new
        return Scan(tuple(taken), len(taken) < len(stable), is_complete=is_marked and len(taken) == len(new))

    def _is_new(self, stat: FileStat) -> bool:
        if stat.url in self._taken or stat.url.rpartition("/")[2].startswith(("_", ".")):
            return False
        refused = self._refused.get(stat.url)
        return refused is None or refused[0] != stat

    def took(self, stats: Iterable[FileStat]) -> None:
        """These belong to the dataset now."""
        for stat in stats:
            self._taken[stat.url] = stat
            self._unstable.pop(stat.url, None)
            self._refused.pop(stat.url, None)
            self._unreadable.pop(stat.url, None)

    def failed(self, stat: FileStat, error: Exception, now: float) -> None:
        """Leave the file out: until a later look if the error is transient, otherwise until the file changes."""
        since, _ = self._unreadable.get(stat.url, (now, ""))
        reason = str(error) or type(error).__name__
        reason = reason if stat.url in reason else f"{stat.url}: {reason}"
        if is_transient(error) and not (self._is_marked and now - since >= PATIENT.limit_s):
            self._unreadable[stat.url] = since, reason
        else:
            self._refused[stat.url] = (stat, reason)
            self._unreadable.pop(stat.url, None)
            self._unstable.pop(stat.url, None)

    @property
    def has_unreadable(self) -> bool:
        """True if files are left out until a later look."""
        return bool(self._unreadable)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Why each refused file was refused; every sentence names its file."""
        return tuple(reason for _, reason in self._refused.values())

    @property
    def trouble(self) -> str:
        """Sentence about a trouble with the files. Empty if there is none."""
        wrong = [
            *self._lost,
            *(f"{reason}: it is left out until it changes" for reason in self.left_out),
            *(f"{reason}: it is left out until it can be read" for _, reason in self._unreadable.values()),
        ]
        return "" if not wrong else wrong[0] + (f" (and {len(wrong) - 1} more files)" if len(wrong) > 1 else "")
