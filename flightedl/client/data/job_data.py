"""Training data and evaluations of one session."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import xxhash
from msgspec.structs import replace

from flightedl.adapters.patience import PatientFiles, Persistence
from flightedl.adapters.storage import FsspecFiles
from flightedl.client import arguments
from flightedl.client.connections import persistently
from flightedl.client.data import evaluation
from flightedl.client.data.attendance import GroupAttendance
from flightedl.client.data.dataset import Dataset, LookAhead
from flightedl.client.data.evaluation import Measure
from flightedl.client.data.feed import TaskFeed
from flightedl.client.data.group_dataset import GroupDataset
from flightedl.client.data.numbered_dataset import NumberedDataset
from flightedl.client.data.options import Reading
from flightedl.client.data.pieces import PieceReader
from flightedl.client.data.ranks import rank_and_size
from flightedl.client.data.reading import ReadTask, batches_of, place_of, reporting
from flightedl.client.participation import Participation
from flightedl.client.process import TrainerProcess
from flightedl.domain.groups.numbered import NumberedBatches
from flightedl.domain.groups.plan import Remainder, RoundPlan
from flightedl.domain.retries import PATIENT
from flightedl.domain.trainer.acknowledged import AcknowledgedLoop
from flightedl.domain.trainer.feed import Ask
from flightedl.domain.trainer.readings import BatchLoop
from flightedl.errors import DataError, UsageError
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import schema_of, spec_of
from flightedl.formats.layout import TaskLayout
from flightedl.formats.mixed_layout import layout_of
from flightedl.formats.reader import Decode
from flightedl.formats.stored_index import PIECES_SCHEMA, index_from_pieces
from flightedl.messages.base import encode
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, EvaluationDeclaration
from flightedl.messages.tasks import EndGrowthRequest, TasksReply
from flightedl.recording.recorded import recorded

_CLOSE_S = 4.0
#: Timeout in seconds for receiving a dataset's index from the master.
_INDEX_S = 60.0


class JobData:
    """The data of one session.

    Args:
        process: The trainer's process.
        participation: The current batch, and requests for tasks.
        require_open: Raises UsageError if the session is over.
        begin_again: Advice for a user who iterates over finished data again.
        look_ahead: Receives the sources of the ids that the next batch looks up; see ``Dataset.prefetching``.
    """

    def __init__(
        self,
        process: TrainerProcess,
        participation: Participation,
        require_open: Callable[[], None],
        begin_again: str,
        look_ahead: LookAhead,
    ) -> None:
        self._process = process
        self._participation = participation
        self._require_open = require_open
        self._begin_again = begin_again
        self._look_ahead = look_ahead
        self._closing = threading.Event()
        self._files = PatientFiles(FsspecFiles(), Persistence(PATIENT, process.clock, self._closing))
        self._dataset: Dataset | None = None
        #: Data of a group. This field and ``_dataset`` are never both set.
        self._group: GroupDataset | NumberedDataset | None = None
        self._attendance: GroupAttendance | None = None
        #: Feed of the current evaluation.
        self._evaluation: TaskFeed | None = None

    def declare(self, declaration: DatasetDeclaration, reading: Reading) -> Dataset:
        """Declare the training data. Raises the same errors as ``Job.dataset``."""
        read_as = self._reader(declaration, reading.decode)
        declared = self._process.ask_master("declare_dataset", encode(declaration), DeclaredDataset)
        self._dataset = Dataset(
            declared,
            self._open_feed,
            read_as(declared),
            self._participation,
            self._process.waiting,
            _CLOSE_S,
            lambda: self._process.send_to_master("end_growth", EndGrowthRequest),
            self._begin_again,
            partial(recorded, self._process.recorder, {"trainer": self._process.trainer}, BatchLoop),
            partial(recorded, self._process.recorder, {"trainer": self._process.trainer}, AcknowledgedLoop),
            explicit_done=reading.explicit_done,
            look_ahead=self._look_ahead,
            trouble_of_files=lambda: self._files.trouble,
            require_lease=self._participation.require_lease,
            read_ahead_bytes=reading.read_ahead_bytes,
            transforming=reading.transforming,
        )
        return self._dataset

    def declare_for_group(
        self, declaration: DatasetDeclaration, reading: Reading, ranks: tuple[int, int], remainder: Remainder
    ) -> GroupDataset:
        """Declare the data of a group to which this process belongs. Raises the same errors as ``Job.dataset``."""
        process, (rank, world_size) = self._process, ranks
        declared, layout, seed, reader = self._planned(declaration, reading.decode)
        if remainder == "drop" and layout.record_count < world_size * declaration.batch_size:
            raise UsageError(
                f"an epoch has fewer records ({layout.record_count}) than a round ({world_size} batches of "
                f'{declaration.batch_size}), so remainder="drop" would leave out all: make batch_size smaller'
            )
        mixture = f" {declaration.mixture} {declaration.stop}" if declaration.mixture else ""
        plan_from = partial(
            RoundPlan,
            layout.task_records,
            epochs=declaration.epochs,
            seed=seed,
            world_size=world_size,
            rank=rank,
            batch_size=declaration.batch_size,
            remainder=remainder,
        )
        # Ranks may read the same data, but must still be different ranks of the group's start.
        launched = rank_and_size("auto")
        plan = f"batch_size={declaration.batch_size}, remainder={remainder!r} and {world_size} data ranks"
        self._attendance = GroupAttendance(process, *(ranks if launched == (0, 1) else launched), plan)
        self._group = GroupDataset(
            declared,
            xxhash.xxh3_64_hexdigest(f"{declared.index_hash} {declaration.records_per_task}{mixture}".encode()),
            lambda start: plan_from(start=start),
            seed,
            reader.read,
            rank,
            self._attendance,
            process.progress.batch,
            process.probe.turn,
            process.waiting,
            lambda: self._files.trouble,
            explicit_commit=reading.explicit_commit,
            read_ahead_bytes=reading.read_ahead_bytes,
            transforming=reading.transforming,
            place=reader.place,
        )
        return self._group

    def declare_numbered(self, declaration: DatasetDeclaration, reading: Reading) -> NumberedDataset:
        """Declare data whose batches the script requests by number. Raises the same errors as ``Job.dataset``."""
        declared, layout, seed, reader = self._planned(declaration, reading.decode)
        batches = NumberedBatches(
            layout.task_records, epochs=declaration.epochs, seed=seed, batch_size=declaration.batch_size
        )
        process = self._process
        self._group = NumberedDataset(
            declared,
            batches,
            lambda step: reading.transforming.of(reader.read(step), partial(reader.place, step)),
            process.progress.batch,
            process.waiting,
            lambda: self._files.trouble,
        )
        return self._group

    def _planned(
        self, declaration: DatasetDeclaration, decode: Decode | None
    ) -> tuple[DeclaredDataset, TaskLayout, int | None, PieceReader]:
        """Declare data whose batches this process plans itself. Return the tasks, their seed and their reader."""
        process = self._process
        # Neither the master nor the tasks depend on the batch size, so it may change at the next start.
        declared = process.ask_master("declare_dataset", encode(replace(declaration, batch_size=1)), DeclaredDataset)
        index = persistently(process.waiting(), self._index)
        if index.content_hash() != declared.index_hash:
            raise DataError("the master has another index of the dataset than the one declared: start this rank again")
        layout = layout_of(index, declaration, 1)
        seed = declaration.seed % 2**64 if declaration.shuffle else None
        reader = PieceReader(self._files, layout, spec_of(declaration), seed, decode, process.progress.skipped)
        return declared, layout, seed, reader

    def _index(self) -> ChunkIndex:
        with self._process.servers.master().get(
            b'{"verb": "index"}', timeout_s=_INDEX_S, schema=PIECES_SCHEMA
        ) as stream:
            return index_from_pieces(batch for batch, _ in stream if batch is not None)

    @property
    def explicit_done(self) -> bool:
        return self._dataset is not None and self._dataset.explicit_done

    def require_undeclared(self) -> None:
        if self._dataset is not None or self._group is not None:
            raise UsageError("this job already has its dataset: declare it once, before the training loop")

    def evaluate(
        self, name: str, declaration: DatasetDeclaration, measure: Measure, decode: Decode | None
    ) -> dict[str, float]:
        """Measure this trainer's share of an evaluation's data. Raises the same errors as ``Job.evaluate``."""
        read_as = self._reader(declaration, decode)
        chosen_name = arguments.name_of("the name of an evaluation", name)
        life = self._process.servers.life
        request = encode(EvaluationDeclaration(name=chosen_name, dataset=declaration, life=life))
        declared = self._process.ask_master("declare_evaluation", request, DeclaredDataset)
        requests = self._process.request_stream()
        last = TasksReply(assignments=[], outcome="none_now")

        def fetch(ask: Ask) -> TasksReply:
            nonlocal last
            last = self._participation.fetch(requests, ask, name)
            return last

        self._evaluation = self._process.task_feed(fetch, requests, name)
        try:
            waiting, advanced = self._process.waiting(), self._process.progress.advanced
            evaluation.run(self._evaluation, read_as(declared), measure, waiting, advanced)
        finally:
            feed, self._evaluation = self._evaluation, None
            feed.close(_CLOSE_S)
        return evaluation.result(name, last)

    def _reader(self, declaration: DatasetDeclaration, decode: Decode | None) -> Callable[[DeclaredDataset], ReadTask]:
        """Return a function that creates readers for the data's tasks. Readers report the records that they skip."""
        spec = spec_of(declaration)

        def read_as(declared: DeclaredDataset) -> ReadTask:
            more: dict[str, Any] = {"schema": schema_of(declared), "decode": decode}

            def read(task: Any) -> Iterator[pa.RecordBatch]:
                skipped = self._process.progress.skipped
                return reporting(lambda counts: batches_of(self._files, task, spec, counts=counts, **more), skipped)

            return read

        return read_as

    def _open_feed(self) -> TaskFeed:
        self._require_open()
        requests = self._process.request_stream()
        return self._process.task_feed(partial(self._participation.fetch, requests), requests)

    def registered_again(self) -> None:
        """Drop all tasks. This trainer has registered again, so other trainers process its tasks."""
        if self._dataset is not None:
            self._dataset.registered_again()
        if self._evaluation is not None:
            self._evaluation.registered_again()

    def raised(self, error: Exception) -> None:
        """Report an exception of the script if a batch is current."""
        current = self._participation.current
        if current is not None and self._dataset is not None:
            last = "".join(traceback.format_exception_only(error)).strip()
            self._dataset.fail_current(current, last, place_of(error))

    @property
    def is_of_group(self) -> bool:
        return self._group is not None

    @property
    def group_batch(self) -> tuple[int, int] | None:
        """Number of records and epoch of the current batch in a rank's loop; None if no batch is current."""
        return None if self._group is None else self._group.current

    def leave_group(self, error: BaseException | None) -> None:
        """Leave the group if this process is one of its ranks. See ``GroupAttendance.leave``."""
        if self._attendance is not None:
            self._attendance.leave(error)

    def close(self) -> None:
        self._closing.set()
        if self._dataset is not None:
            self._dataset.close()
        if self._group is not None:
            self._group.close()
