"""Indexes of evaluation datasets. An index is built when the first trainer requests it, and again after a takeover."""

from __future__ import annotations

from collections.abc import Callable

from flightedl.domain.queue.values import QueueSettings
from flightedl.domain.topics import is_topic
from flightedl.errors import DataError, UsageError
from flightedl.master.indexing import DatasetIndexing, IndexedDataset
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, EvaluationDeclaration


class EvaluationDatasets:
    """Datasets of all evaluations. Callers must not hold the master's lock, because indexing may take a long time."""

    def __init__(self, indexing: Callable[[], DatasetIndexing], queue_settings: Callable[..., QueueSettings]) -> None:
        self._new_indexing = indexing
        self._queue_settings = queue_settings
        self._indexing: dict[str, DatasetIndexing] = {}
        self._found: dict[str, IndexedDataset] = {}

    def index(self, name: str, wanted: DeclaredDataset | EvaluationDeclaration) -> IndexedDataset:
        """Return the index of an evaluation's dataset.

        Raises:
            NotReadyError: the dataset is being indexed. Repeat the request.
            DataError: a file is unusable, or has changed since a predecessor indexed it.
        """
        declaration = wanted.dataset if isinstance(wanted, EvaluationDeclaration) else wanted.declaration
        if declaration.follow or is_topic(*declaration.urls):
            raise UsageError("an evaluation cannot follow a growing dataset: declare files, without follow=True")
        indexed = self._indexing.setdefault(name, self._new_indexing()).index(declaration)
        if isinstance(wanted, DeclaredDataset) and indexed.reply.index_hash != wanted.index_hash:
            raise DataError(f"the files of the evaluation {name!r} have changed since it began: use another name")
        return indexed

    def admitted(self, declared: DatasetDeclaration) -> DatasetDeclaration:
        """See ``DatasetIndexing.admitted``."""
        return self._new_indexing().admitted(declared)

    def keep(self, name: str, indexed: IndexedDataset) -> None:
        self._indexing.pop(name, None)
        self._found[name] = indexed

    def settings_of(self, indexed: IndexedDataset) -> QueueSettings:
        return self._queue_settings(task_count=indexed.layout.task_count, batch_counts=indexed.layout.batch_count)

    def dataset(self, name: str) -> IndexedDataset | None:
        return self._found.get(name)

    def forget(self, name: str) -> None:
        self._found.pop(name, None)
