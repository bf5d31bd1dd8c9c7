"""Add files to a dataset during training.

Every few seconds, a thread looks for new files according to the rules in ``formats.following``. It indexes the new
files and adds their tasks to the queue, in the transaction that also records their arrival, so that a successor has
both or neither. When the dataset is complete, the thread informs the queue, so that the last epoch may end, and reports
the excluded files.

An unusable file does not end the job: ``status`` reports the file, and the thread reads it again when the file has
changed. After a brief failure of the store, the thread retries in the next scan.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from flightedl.domain.master.events import GrowthEnded
from flightedl.domain.topics import is_topic
from flightedl.errors import FlightedlError, NotReadyError, UsageError
from flightedl.formats.dataset_spec import spec_of
from flightedl.formats.following import DirectoryFollower, follower_of
from flightedl.formats.index import extended_index
from flightedl.formats.stored_index import store
from flightedl.formats.topics import TASK_OFFSETS
from flightedl.master.indexing import IndexedDataset, arrival_of, layout_of, look, stats_of
from flightedl.master.state import JobState
from flightedl.messages.base import Sender
from flightedl.ports import Files, FileStat, Storage

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0
#: Seconds that a call waits for the end of growth before it answers "not ready".
_QUICK_S = 1.5


class Growing:
    """Growth of one job's dataset. Thread-safe."""

    def __init__(
        self,
        state: JobState,
        files: Files,
        storage: Storage | None,
        every_s: float,
        step_down: Callable[[str], None],
    ) -> None:
        self._state = state
        self._files = files
        self._storage = storage
        self._every_s = every_s
        self._step_down = step_down
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._has_ended = threading.Event()
        self._stopping = threading.Event()
        #: True if a trainer has declared that the dataset is complete.
        self._is_declared_complete = False

    def begin(self) -> None:
        """Start looking for new files if the dataset may grow. Its current state must be in etcd. Idempotent."""
        with self._state.lock:
            work = self._state.core.work
            is_growing = work is not None and work.queue.is_growing
            dataset = self._state.dataset
        with self._lock:
            if dataset is None or not is_growing or self._thread is not None or self._stopping.is_set():
                return
            self._state.arrivals_saved = len(dataset.arrivals)
            self._thread = threading.Thread(target=self._run, args=(dataset,), name="flightedl-growing", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def end(self, sender: Sender) -> None:
        """Add the existing files, then let the last epoch end, because a trainer declared the dataset complete.

        Raises:
            UnregisteredError: the trainer's lease has ended.
            UsageError: the dataset does not grow.
            NotReadyError: the last files are being added. Repeat the request.
        """
        with self._state.lock:
            self._state.core.leases.require(sender)
            dataset, work = self._state.dataset, self._state.core.work
            if dataset is None or work is None:
                raise NotReadyError("no trainer has declared the dataset yet")
            if not dataset.reply.declaration.follow:
                raise UsageError("the dataset does not grow: it was declared without follow=True")
            if not work.queue.is_growing:
                return
        self._is_declared_complete = True
        self._wake.set()
        if not self._has_ended.wait(_QUICK_S):
            trouble = self._state.dataset_alarm
            raise NotReadyError("the last files of the dataset are being added" + (f": {trouble}" if trouble else ""))

    def _run(self, dataset: IndexedDataset) -> None:
        declared = dataset.reply.declaration
        following = follower_of(declared.urls, stats_of(dataset.arrivals), declared.records_per_task or TASK_OFFSETS)
        has_more = False
        while not self._stopping.is_set():
            if not has_more:
                self._wake.wait(self._every_s)
                self._wake.clear()
            if self._stopping.is_set():
                return
            try:
                has_more, is_complete = self._look(following, declared.urls)
            except FlightedlError as error:
                has_more, is_complete = False, False
                self._note(f"cannot look for new files now; retrying: {error}")
            except Exception as error:  # noqa: BLE001 - without this thread the dataset would never be complete
                _log.exception("looking for new files failed")
                self._step_down(f"it cannot look for new files: {error!r}")
                return
            if is_complete:
                self._has_ended.set()
                return

    def _look(self, following: DirectoryFollower, urls: Sequence[str]) -> tuple[bool, bool]:
        """Look for new files once. Return (True if more files can be added now, True if the dataset is complete)."""
        scan = look(self._files, following, urls, is_declared_complete=self._is_declared_complete)
        self._state.names_left_out = following.names_left_out
        if scan.stable and not self._add(following, scan.stable):
            return False, False
        self._note(following.trouble)
        if following.has_unreadable:
            return False, False
        if not scan.is_complete:
            return scan.has_more, False
        self._state.apply(GrowthEnded(following.left_out))
        if not self._state.becomes_durable(self._stopping.is_set):
            return False, False
        _log.info("the dataset is complete files=%d", 0 if self._state.dataset is None else self._file_count())
        return False, True

    def _add(self, following: DirectoryFollower, stable: Sequence[FileStat]) -> bool:
        known = self._state.dataset
        assert known is not None, "files join a declared dataset"
        spec = spec_of(known.reply.declaration)
        index, failed = extended_index(self._files, spec, known.layout.index, stable)
        for stat, error in failed.items():
            following.failed(stat, error, self._state.clock.now())
        added = [stat for stat in stable if stat not in failed]
        if not added:
            return True
        arrivals = (*known.arrivals, arrival_of(added))
        grown = IndexedDataset(layout_of(index, known.reply, arrivals), known.reply, arrivals)
        self._state.grow_dataset(grown)
        if not self._state.becomes_durable(self._stopping.is_set):
            return False
        self._state.arrivals_saved = len(arrivals)
        following.joined(added)
        _log.info(
            "files joined the dataset files=%d tasks=%d all_files=%d all_tasks=%d",
            len(added),
            grown.layout.task_count - known.layout.task_count,
            self._file_count(),
            grown.layout.task_count,
        )
        if self._storage is not None and not is_topic(*spec.urls):  # Topics are indexed without being read.
            store(self._storage, spec, index)
        return True

    def _file_count(self) -> int:
        dataset = self._state.dataset
        return 0 if dataset is None else sum(len(arrival.files) for arrival in dataset.arrivals)

    def _note(self, trouble: str) -> None:
        if trouble and trouble != self._state.dataset_alarm:
            _log.warning("dataset: %s", trouble)
        self._state.dataset_alarm = trouble
