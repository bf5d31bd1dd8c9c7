"""Index a declared dataset in the background, because reading many files takes longer than a call may take.

The first trainer's declaration starts the indexing. Until the index is complete, all calls are answered with "not
ready" and the progress. After that, they return the result or raise the error. An error is dropped after one minute, so
that the dataset can be declared again when a file has been corrected.

If the store fails briefly, indexing retries (``domain.retries``). If it fails for longer, the declaration of a new
dataset fails, but a job that has already declared its dataset continues to wait.

If the job has a storage, the index is stored there, next to the checkpoints, and later jobs with the same data read
only files that have changed. After a takeover, the master uses the stored index if the job was declared with it, and
then reads no data file. So takeovers are fast, and work even if the store of the data files is unreachable. Readers
detect changed files.

A followed dataset begins with the files that the first successful scan finds; ``growing`` adds more. The dataset's
*arrivals*, which are groups of files that were added together, are part of the durable state. The index is made from
the arrivals, in order.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import msgspec

from flightedl.adapters.patience import PatientFiles, Persistence
from flightedl.domain.data_urls import as_declared
from flightedl.domain.master.differences import require_same
from flightedl.domain.queue.drawing import advice_of
from flightedl.domain.retries import PATIENT
from flightedl.domain.topics import is_topic
from flightedl.errors import DataError, NotReadyError, UnavailableError
from flightedl.formats import mixed_layout
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import schema_of, spec_of
from flightedl.formats.following import DirectoryFollower, Scan, follower_of, marker_urls
from flightedl.formats.index import IndexProgress, restored_index
from flightedl.formats.layout import TaskLayout
from flightedl.formats.mixed_layout import drawing_of
from flightedl.formats.stored_index import load_or_build, load_stored
from flightedl.messages.declarations import ArrivalRecord, DatasetDeclaration, DeclaredDataset, Drawing
from flightedl.ports import Clock, Files, FileStat, Storage
from flightedl.process.background import Background

_log = logging.getLogger(__name__)

#: Maximum number of skipped corrupt parts to log. The status counts all of them.
_LOGGED_SKIPPED = 10

_ERROR_KEPT_S = 60.0
#: Seconds that a call waits for the index before it answers "not ready", because indexing may be fast.
_QUICK_S = 1.5


@dataclass(frozen=True, slots=True)
class IndexedDataset:
    """A dataset whose tasks are known."""

    layout: TaskLayout
    reply: DeclaredDataset
    #: Arrivals of a followed dataset, in order.
    arrivals: tuple[ArrivalRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class _Work:
    declared: DatasetDeclaration
    indexed: Background[IndexedDataset]


class DatasetIndexing:
    """Indexes datasets, at most one at a time. Thread-safe.

    If ``storage`` is given, indexes are stored there. ``stop`` ends all waits for a store.
    """

    def __init__(
        self,
        files: Files,
        clock: Clock,
        storage: Storage | None = None,
        *,
        follow_every_s: float = 5.0,
        stop: threading.Event | None = None,
    ) -> None:
        self._follow_every_s = follow_every_s
        self._closing = threading.Event()
        self._files = PatientFiles(files, Persistence(PATIENT, clock, stop or self._closing))
        self._clock = clock
        self._storage = storage
        self._lock = threading.Lock()
        self._work: _Work | None = None
        self._ended_at = 0.0
        self._doing = ""

    @property
    def doing(self) -> str:
        return f"{self._doing}: {self._files.trouble}" if self._doing and self._files.trouble else self._doing

    def admitted(self, declared: DatasetDeclaration) -> DatasetDeclaration:
        """Return the declaration as its identity, without secrets. Remember how to access its files."""
        self._files.declare(declared.urls, declared.data_moved)
        urls = [as_declared(url, declared.data_moved) for url in declared.urls]
        return msgspec.structs.replace(declared, urls=urls, data_moved={})

    def index(self, declared: DatasetDeclaration) -> IndexedDataset:
        """Return the indexed dataset.

        Raises:
            NotReadyError: the dataset is being indexed. Repeat the request.
            DataError: a file is unusable.
            DeclarationError: a different dataset is being indexed for this job.
        """
        with self._lock:
            work = self._work
            has_failed = work is not None and work.indexed.error is not None
            is_stale = has_failed and self._clock.now() - self._ended_at > _ERROR_KEPT_S
            if work is None or is_stale or (has_failed and work.declared != declared):
                build = partial(self._build_first, declared)
                work = self._work = _Work(declared, Background("indexing", build, self._end))
        require_same("dataset", work.declared, declared)
        found = work.indexed.result(_QUICK_S)
        if found is None:
            raise NotReadyError(self.doing or "the dataset is being indexed")
        return found

    def index_again(self, known: DeclaredDataset, arrivals: Sequence[ArrivalRecord] = ()) -> IndexedDataset:
        """Index the dataset that was declared to a predecessor. ``arrivals`` are the arrivals of a followed dataset.

        Raises:
            DataError: the dataset cannot be read, or has changed.
            UnavailableError: the store has failed for longer than a moment.
        """
        spec = spec_of(known.declaration)
        stored = None if self._storage is None else load_stored(self._storage, spec)
        if arrivals:
            stats = stats_of(arrivals)
            index = restored_index(self._files, spec, stats, schema_of(known), known=stored)
            return IndexedDataset(layout_of(index, known, arrivals), known, tuple(arrivals))
        if stored is not None and stored.content_hash() == known.index_hash:
            return _indexed(stored, known.declaration, known.drawing)
        dataset = self._build(known.declaration, known.drawing)
        if dataset.reply.index_hash != known.index_hash:
            raise DataError(
                "the dataset's files have changed since the job began: start a new job, or restore the files"
            )
        is_copy = any(stat.is_copy for stat in dataset.layout.index.stats)
        if known.version_hash not in ("", dataset.reply.version_hash) and not is_copy:
            raise DataError(
                "the times or ETags of files have changed since the job began, so values may have changed, too: "
                "restore the files or, if they are copies, say so with --data-moved OLD=NEW (maybe the same folder)"
            )
        return dataset

    def close(self) -> None:
        self._closing.set()

    def _end(self, _: object) -> None:
        self._ended_at = self._clock.now()
        self._doing = ""

    def _build_first(self, declared: DatasetDeclaration) -> IndexedDataset:
        """Index a dataset that no job depends on yet. A permanent failure of its store is a user error."""
        try:
            return self._build(declared, drawing_of(declared))
        except NotReadyError:
            raise
        except UnavailableError as error:
            raise DataError(f"{error}; the last attempt was made after {PATIENT.limit_s:g} s") from None

    def _build(self, declared: DatasetDeclaration, drawing: Drawing | None) -> IndexedDataset:
        def note(progress: IndexProgress) -> None:
            self._doing = f"the dataset to be indexed: {progress.files_done} of {progress.file_count} files"

        stats = self._first_files(declared) if declared.follow else None
        self._doing = "the dataset to be indexed"
        loaded = load_or_build(self._files, self._storage, spec_of(declared), progress=note, stats=stats)
        self._doing = ""
        for sentence in loaded.index.skipped[:_LOGGED_SKIPPED]:
            _log.warning("skipped: %s", sentence)
        for sentence in loaded.index.left_out:
            _log.info("%s", sentence)
        for url in loaded.index.without_records[:_LOGGED_SKIPPED]:
            _log.warning("%s has no records", url)
        found = _indexed(loaded.index, declared, drawing)
        _log.info(
            "dataset indexed tasks=%d records=%d files=%d files_read=%d",
            found.layout.task_count,
            found.layout.record_count,
            len(loaded.index.stats),
            loaded.files_read,
        )
        for sentence in found.reply.advice:
            _log.info("shuffle=True: %s", sentence)
        return found

    def _first_files(self, declared: DatasetDeclaration) -> tuple[FileStat, ...]:
        following = follower_of(declared.urls)
        while True:
            self._doing = f"the first {'message' if is_topic(*declared.urls) else 'file'} of {declared.urls[0]}"
            found = look(self._files, following, declared.urls).stable
            if stable := tuple(stat for stat in found if stat.version):  # Links without a target may get one later.
                return stable
            if self._closing.wait(self._follow_every_s):
                raise NotReadyError("the master is stepping down: retry with its successor")


def look(
    files: Files, following: DirectoryFollower, urls: Sequence[str], *, is_declared_complete: bool = False
) -> Scan:
    """List the files of a followed dataset. It is complete if a trainer has declared this, or if all end markers exist.

    Raises:
        DataError: the files cannot be listed.
    """
    is_marked = is_declared_complete or all(files.stat(url) is not None for url in marker_urls(urls))
    listing = files.expand(urls, may_be_empty=True)
    following.names_left_out = listing.left_out
    return following.look(listing, is_marked=is_marked)


def arrival_of(stats: Sequence[FileStat]) -> ArrivalRecord:
    """Return the record of files that were added together."""
    return ArrivalRecord(files=[(stat.url, stat.size_bytes, stat.version) for stat in stats])


def stats_of(arrivals: Sequence[ArrivalRecord]) -> tuple[FileStat, ...]:
    """Return all files that were added so far, in order."""
    return tuple(FileStat(*file) for arrival in arrivals for file in arrival.files)


def layout_of(index: ChunkIndex, known: DeclaredDataset, arrivals: Sequence[ArrivalRecord]) -> TaskLayout:
    """Divide a followed dataset into tasks. The tasks of an arrival stay the same when more files arrive."""
    files = list(accumulate(len(arrival.files) for arrival in arrivals))
    bounds = [index.first_chunk(number) for number in files[:-1]]
    return mixed_layout.layout_of(index, known.declaration, known.declaration.batch_size, bounds, known.drawing)


def _indexed(index: ChunkIndex, declared: DatasetDeclaration, drawing: Drawing | None) -> IndexedDataset:
    arrivals = (arrival_of(index.stats),) if declared.follow or is_topic(*declared.urls) else ()
    layout = mixed_layout.layout_of(index, declared, declared.batch_size, drawing=drawing)
    mixed, sentences = 0, []
    if drawing is not None and layout.pieces is not None:
        advice = advice_of(layout.pieces, index.records, index.decoded_bytes, drawing.size_bytes)
        mixed, sentences = advice.mixed_chunks, [advice.text, *advice.warnings]
    reply = DeclaredDataset(
        index_hash=index.content_hash(),
        task_count=layout.task_count,
        record_count=layout.record_count,
        schema=base64.b64encode(index.schema.serialize().to_pybytes()).decode(),
        declaration=declared,
        version_hash=index.version_hash(),
        task_batches=layout.task_batches(),
        drawing=drawing,
        mixed_chunks=mixed,
        advice=sentences,
    )
    return IndexedDataset(layout, reply, arrivals)
