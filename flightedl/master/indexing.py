"""Makes tasks of a declared dataset, in the background: indexing many files takes longer than a call may.

The first trainer's declaration starts the work; all trainers' calls are answered "not ready" with the progress until
it is done, then by the reply or by the error. An error is told to everybody who asks within a minute and then
forgotten, so that a corrected file can be declared again.

With a storage (beside the checkpoints) the index is kept there: the next job of the same data reads only files that
have changed. A master's successor takes the stored index as it is when it is the one that the job was declared with,
without asking for the files: takeover is quick, and works while their store does not answer. Whether a file changed is
seen by whoever reads it.
"""

from __future__ import annotations

import base64
import logging
import threading
from dataclasses import dataclass

from flightedl.errors import DataError, FlightedlError, NotReadyError
from flightedl.formats.declared import spec_of
from flightedl.formats.index import ChunkIndex, IndexProgress
from flightedl.formats.layout import TaskLayout
from flightedl.formats.stored_index import load_or_build, load_stored
from flightedl.master.declarations import require_same
from flightedl.ports import Clock, Files, Storage
from flightedl.wire.messages import DatasetDeclaration, DatasetReply

_log = logging.getLogger(__name__)

_ERROR_KEPT_S = 60.0
#: A call waits this long for a quick index before it answers "not ready".
_QUICK_S = 1.5


@dataclass(frozen=True, slots=True)
class IndexedDataset:
    """A dataset whose tasks are known."""

    layout: TaskLayout
    reply: DatasetReply


@dataclass(slots=True)
class _Work:
    declared: DatasetDeclaration
    finished: threading.Event
    result: IndexedDataset | None = None
    error: FlightedlError | None = None
    ended_at: float = 0.0


class DatasetIndexing:
    """At most one index is built at a time. Thread-safe."""

    def __init__(self, files: Files, clock: Clock, storage: Storage | None = None) -> None:
        """``storage``: where indexes are kept; None: nowhere."""
        self._files = files
        self._clock = clock
        self._storage = storage
        self._lock = threading.Lock()
        self._work: _Work | None = None
        #: What is being done, for people; empty: nothing.
        self.doing = ""

    def index(self, declared: DatasetDeclaration) -> IndexedDataset:
        """The indexed dataset.

        Raises:
            NotReadyError: it is being indexed; ask again.
            DataError: a file cannot be used.
            DeclarationError: another dataset is being indexed for this job.
        """
        with self._lock:
            work = self._work
            stale = work is not None and work.error is not None and self._clock.now() - work.ended_at > _ERROR_KEPT_S
            if work is None or stale or (work.error is not None and work.declared != declared):
                work = self._work = _Work(declared, threading.Event())
                threading.Thread(target=self._run, args=(work,), name="flightedl-index", daemon=True).start()
        require_same("dataset", work.declared, declared)
        if not work.finished.wait(_QUICK_S):
            raise NotReadyError(self.doing or "the dataset is being indexed")
        if work.error is not None:
            raise work.error
        assert work.result is not None
        return work.result

    def index_again(self, known: DatasetReply) -> IndexedDataset:
        """Index what a predecessor had indexed.

        Raises:
            DataError: it cannot be read, or is not the same any more.
        """
        if self._storage is not None:
            stored = load_stored(self._storage, spec_of(known.declaration))
            if stored is not None and stored.content_hash() == known.index_hash:
                return _indexed(stored, known.declaration)
        dataset = self._build(known.declaration)
        if dataset.reply.index_hash != known.index_hash:
            raise DataError(
                "the dataset's files have changed since the job began: start a new job, or restore the files"
            )
        return dataset

    def close(self) -> None:
        """Nothing is held beyond the process."""

    def _run(self, work: _Work) -> None:
        try:
            work.result = self._build(work.declared)
        except FlightedlError as error:
            work.error = error
        except Exception as error:  # noqa: BLE001 - a bug must reach the trainers that wait, not only a thread's end
            _log.exception("indexing failed")
            work.error = DataError(f"the dataset cannot be indexed: {type(error).__name__}")
        finally:
            work.ended_at = self._clock.now()
            self.doing = ""
            work.finished.set()

    def _build(self, declared: DatasetDeclaration) -> IndexedDataset:
        def note(progress: IndexProgress) -> None:
            self.doing = f"the dataset to be indexed: {progress.files_done} of {progress.file_count} files"

        self.doing = "the dataset to be indexed"
        loaded = load_or_build(self._files, self._storage, spec_of(declared), progress=note)
        self.doing = ""
        found = _indexed(loaded.index, declared)
        _log.info(
            "dataset indexed tasks=%d records=%d files=%d files_read=%d",
            found.layout.task_count,
            found.layout.record_count,
            len(loaded.index.stats),
            loaded.files_read,
        )
        return found


def _indexed(index: ChunkIndex, declared: DatasetDeclaration) -> IndexedDataset:
    layout = TaskLayout(index, batch_size=declared.batch_size, records_per_task=declared.records_per_task)
    reply = DatasetReply(
        index_hash=index.content_hash(),
        task_count=layout.task_count,
        record_count=layout.record_count,
        schema=base64.b64encode(index.schema.serialize().to_pybytes()).decode(),
        declaration=declared,
    )
    return IndexedDataset(layout, reply)
