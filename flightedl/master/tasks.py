"""Tickets from trainers, which report finished work and request more, for training data and for evaluations.

A request is answered when its changes are durable, so a successor knows every assignment that trainers have received.
"""

from __future__ import annotations

import threading

import msgspec
import pyarrow as pa

from flightedl.domain.master.effects import Kind
from flightedl.domain.master.events import EvaluationIndexed
from flightedl.errors import NotReadyError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.chunks import Chunk
from flightedl.formats.stored_index import index_to_pieces
from flightedl.master.failures import lost_data
from flightedl.master.state import JobState
from flightedl.messages.declarations import DeclaredDataset, EvaluationDeclaration
from flightedl.messages.tasks import TasksReply, TasksTicket

#: (reply to a trainer, chunks of each assigned task, chunks of each task that the trainer may read early).
Work = tuple[TasksReply, list[list[Chunk]], list[list[Chunk]]]


class Tasks:
    """Handler of tickets. Thread-safe."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._encoding = threading.Lock()
        self._encoded: tuple[ChunkIndex, list[pa.RecordBatch]] | None = None

    def exchange(self, ticket: TasksTicket, closing: threading.Event) -> Work:
        """Apply the reports in a ticket and assign tasks. When this returns, the changes are durable.

        Raises:
            UnregisteredError: the trainer's lease has ended.
            JobFailedError: too many pieces have failed, or pservers still lack repeated tasks.
            NotReadyError: no dataset has been declared yet, or etcd cannot be written.
        """
        state = self._state
        if ticket.evaluation:
            return self._evaluation_tasks(ticket)
        if ticket.failed:
            with state.lock:
                if state.core.trainers.get(ticket.trainer) == ticket.generation:
                    state.progress.failed(ticket.failed, state.clock.now(), ticket.witness)
            for report in ticket.failed:
                # The core records quarantined batches but not every other failure, and it does not use the failures'
                # locations.
                at = "" if report.batch is None else f" batch={report.batch}"
                text = f"work failed epoch={report.epoch + 1}{at} place={report.place or '-'}: {report.error}"
                state.journal.add(Kind.WORK_FAILED, ticket.trainer, text, is_warning=True)
        reply: TasksReply = state.ask(ticket, closing)
        dataset = state.dataset
        assert dataset is not None or not reply.assignments, "tasks are of a dataset"
        if dataset is None:
            return reply, [], []
        if reply.outcome == "epochs_done":
            with state.lock:
                if state.core.work is not None:
                    reply = msgspec.structs.replace(reply, **lost_data(state.core.work.queue, dataset))
        chunks_of = dataset.layout.chunks_of
        return reply, [chunks_of(each.task) for each in reply.assignments], [chunks_of(a.task) for a in reply.ahead]

    def index_pieces(self) -> list[pa.RecordBatch]:
        """Return the index of the declared dataset, from which the ranks of a group compute their rounds.

        The index is encoded only once, because every rank requests it, and encoding a million chunks takes two seconds.

        Raises:
            NotReadyError: no dataset has been declared yet.
        """
        dataset = self._state.dataset
        if dataset is None:
            raise NotReadyError("no dataset is declared yet")
        index = dataset.layout.index
        with self._encoding:
            if self._encoded is None or self._encoded[0] is not index:
                self._encoded = index, index_to_pieces(index)
            return self._encoded[1]

    def declare_evaluation(self, request: EvaluationDeclaration) -> DeclaredDataset:
        """Declare an evaluation. For each name, the first declaration is adopted.

        Raises:
            DataError: a file is unusable.
            DeclarationError: the evaluation with this name has a different dataset.
            NotReadyError: the index is being built. Repeat the request.
        """
        dataset = self._state.evaluation_datasets.admitted(request.dataset)
        request = msgspec.structs.replace(request, dataset=dataset)
        reply = self._state.declare(request, lambda: self._begin_evaluation(request.name, request))
        assert isinstance(reply, DeclaredDataset), "an indexed evaluation is declared"
        return reply

    def _begin_evaluation(self, name: str, wanted: DeclaredDataset | EvaluationDeclaration) -> None:
        datasets = self._state.evaluation_datasets
        indexed = datasets.index(name, wanted)
        datasets.keep(name, indexed)
        self._state.apply(EvaluationIndexed(name, indexed.reply, datasets.settings_of(indexed)))

    def _evaluation_tasks(self, ticket: TasksTicket) -> Work:
        state = self._state
        with state.lock:
            found = state.core.evaluations.known(ticket.evaluation)
            has_to_begin = found is not None and found.work is None and not found.is_done
        if found is not None and has_to_begin:
            self._begin_evaluation(found.record.name, found.record.declared)
        dataset = state.evaluation_datasets.dataset(ticket.evaluation)
        reply: TasksReply = state.ask(ticket)
        if dataset is None:
            return reply, [], []
        if reply.outcome == "epochs_done":
            state.evaluation_datasets.forget(ticket.evaluation)
        return reply, [dataset.layout.chunks_of(each.task) for each in reply.assignments], []
