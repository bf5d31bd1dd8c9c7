"""Rules for growing datasets: when a file is added, and when the dataset is complete.

Rules:

* The follower scans repeatedly. A file is *added* when two consecutive scans find it with the same size and version, so
  a file is not added while it is being written.
* A file named ``_END`` in the directory of a pattern (the deepest directory without a wildcard) announces that no more
  files will arrive. The files that exist at that time are added immediately, and the dataset is *complete*. If there
  are several patterns, each directory needs this file.
* Files whose names begin with ``_`` or ``.`` are never data. A link without a target is rejected until it has one.
* A file that was added keeps its position: files are ordered by the scan that found them, and then by name. If such a
  file is later removed or gets another size, this is reported as *trouble* until the file is back. If only its version
  has changed, its readers find out if its content has. A rejected file is also reported, until it changes.
* If the store temporarily cannot read a file, later scans try again. Once the dataset can no longer grow, a file that
  has been unreadable for as long as ``retries.PATIENT`` permits is rejected. A complete dataset lists its rejected
  files.

Pure: no clock, no I/O.

A file whose writer pauses for longer than the interval between scans may be added while it is incomplete. Writers
should use a name that no pattern matches, and then rename the file, as Hadoop, Spark and rsync do.

Rules for Kafka topics, whose ranges of offsets are the files:

* A range begins where the partition's previous range ended, and ends with its last committed message. The first ranges
  begin with the oldest messages, and name every partition. Partitions that are found later begin at offset 0.
* New messages are added by the second scan that finds some, or by the first one if they fill a task.
* If the broker has deleted messages before a range contained them, the complete dataset lists their offsets, as it
  lists rejected files. If a partition ends before messages that were added, this is trouble.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flightedl.domain.data_urls import fixed_parts
from flightedl.domain.retries import PATIENT, is_transient
from flightedl.domain.topics import is_topic, topic_and_ranges, url_of
from flightedl.ports import FileStat

MARKER = "_END"
#: Limits of a scan: number of files, and total size of their names in bytes. The list of files is a single value in
#: etcd.
JOINED_LIMIT = 1000
JOINED_LIMIT_BYTES = 200_000


def marker_urls(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct URLs of the end markers for these patterns."""
    return tuple(dict.fromkeys("/".join([*fixed_parts(pattern), MARKER]) for pattern in patterns))


@dataclass(frozen=True, slots=True)
class Scan:
    """Result of one scan."""

    #: Files to index. The caller reports the outcome for each file by ``joined`` or ``failed``.
    stable: tuple[FileStat, ...]
    #: True if more files are stable, so that the next scan should follow immediately.
    has_more: bool
    #: True if no more files will arrive, and each existing file has been added or rejected.
    is_complete: bool


class DirectoryFollower:
    """State of the files in one growing dataset. Not thread-safe.

    Args:
        taken: Files that were added earlier, in order.
    """

    #: End of a sentence about a rejected file.
    _until = ": it is left out until it changes"

    def __init__(self, taken: Iterable[FileStat] = ()) -> None:
        self._taken = {stat.url: stat for stat in taken}
        #: Files that have been seen only once, or that have changed since the previous scan.
        self._unstable: dict[str, FileStat] = {}
        self._refused: dict[str, tuple[FileStat, str]] = {}
        #: Temporarily unreadable files, each with the time when it was first unreadable, and the reason.
        self._unreadable: dict[str, tuple[float, str]] = {}
        self._is_marked = False
        #: For each reason why the latest scan left out matching names, a sentence.
        self.names_left_out: tuple[str, ...] = ()
        self._lost: list[str] = []

    def look(self, found: Sequence[FileStat], *, is_marked: bool) -> Scan:
        """Process the list of files from a scan. Before listing, the caller must check the marker (``is_marked``)."""
        self._is_marked = is_marked
        there = {stat.url: stat for stat in found}
        self._lost = [
            f"{url} {'is gone' if url not in there else 'has changed'} since it was taken into the dataset"
            for url, stat in self._taken.items()
            if url not in there or there[url].size_bytes != stat.size_bytes
        ]
        self._refused = {url: refused for url, refused in self._refused.items() if url in there}
        self._unreadable = {url: failed for url, failed in self._unreadable.items() if url in there}
        new = {url: stat for url, stat in sorted(there.items()) if self._is_new(stat)}
        stable = [stat for url, stat in new.items() if is_marked or self._unstable.get(url) == stat]
        taken: list[FileStat] = []
        size_bytes = 0
        for stat in stable[:JOINED_LIMIT]:
            size_bytes += len(stat.url.encode()) + len(stat.version) + 50
            if taken and size_bytes > JOINED_LIMIT_BYTES:
                break
            taken.append(stat)
        self._unstable = new
        return Scan(tuple(taken), len(taken) < len(stable), is_complete=is_marked and len(taken) == len(new))

    def _is_new(self, stat: FileStat) -> bool:
        if stat.url in self._taken or stat.url.rpartition("/")[2].startswith(("_", ".")):
            return False
        refused = self._refused.get(stat.url)
        return refused is None or refused[0] != stat

    def joined(self, stats: Iterable[FileStat]) -> None:
        for stat in stats:
            self._taken[stat.url] = stat
            self._unstable.pop(stat.url, None)
            self._refused.pop(stat.url, None)
            self._unreadable.pop(stat.url, None)

    def failed(self, stat: FileStat, error: Exception, now: float) -> None:
        """Exclude the file until a later scan if the error is transient, otherwise until the file changes."""
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
        """True if any file is excluded only until a later scan."""
        return bool(self._unreadable)

    @property
    def left_out(self) -> tuple[str, ...]:
        """One sentence per rejected file, with its name and the reason."""
        return tuple(reason for _, reason in self._refused.values())

    @property
    def trouble(self) -> str:
        """Sentence about missing, changed, rejected or unreadable files; empty if there are none."""
        wrong = [
            *self._lost,
            *(f"{reason}{self._until}" for reason in self.left_out),
            *(f"{reason}: it is left out until it can be read" for _, reason in self._unreadable.values()),
        ]
        return "" if not wrong else wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")


class TopicFollower(DirectoryFollower):
    """State of the ranges of offsets in one growing dataset. ``task_offsets``: number of offsets that fill a task."""

    _until = ""

    def __init__(self, taken: Iterable[FileStat] = (), task_offsets: int = 1) -> None:
        super().__init__()
        self._task_offsets = task_offsets
        #: Topic -> partition -> the offset after those that were added.
        self._ends: dict[str, dict[int, int]] = {}
        #: Topics in which the previous scan has found new messages.
        self._waiting: set[str] = set()
        self.joined(taken)

    def look(self, found: Sequence[FileStat], *, is_marked: bool) -> Scan:
        """Process the topics from a scan, each with the ranges of all readable offsets."""
        self._lost, stable = [], []
        for stat in found:
            topic, readable = topic_and_ranges(stat.url)
            is_first, ends = topic not in self._ends, self._ends.get(topic, {})
            self._lost += [
                f"partition {number} of {topic} ends before offset {end}, up to which it was taken into the dataset"
                for number, end in ends.items()
                if readable.get(number, range(0)).stop < end
            ]
            new = {number: range(max(each.start, ends.get(number, 0)), each.stop) for number, each in readable.items()}
            size = sum(map(len, new.values()))
            if size and (is_marked or is_first or size >= self._task_offsets or topic in self._waiting):
                ranges = {number: offsets for number, offsets in new.items() if offsets or is_first}
                stable.append(FileStat(url_of(topic, ranges), size, stat.version))
            elif size:
                self._waiting.add(topic)
        return Scan(tuple(stable), has_more=False, is_complete=is_marked)

    def joined(self, stats: Iterable[FileStat]) -> None:
        for stat in stats:
            topic, ranges = topic_and_ranges(stat.url)
            self._waiting.discard(topic)
            is_first, ends = topic not in self._ends, self._ends.setdefault(topic, {})
            for number, offsets in ranges.items():
                end = offsets.start if is_first else ends.get(number, 0)
                if end < offsets.start:
                    deleted = FileStat(url_of(topic, {number: range(end, offsets.start)}), 0, stat.version)
                    text = (
                        f"partition {number} of {topic}: the broker deleted offsets {end}-{offsets.start - 1} before "
                    )
                    self._refused[deleted.url] = deleted, f"{text}they became tasks; keep them longer (retention.ms)"
                ends[number] = offsets.stop


def follower_of(urls: Sequence[str], taken: Iterable[FileStat] = (), task_offsets: int = 1) -> DirectoryFollower:
    """Return the follower of a dataset, which consists of files or of topics."""
    return TopicFollower(taken, task_offsets) if is_topic(*urls) else DirectoryFollower(taken)
