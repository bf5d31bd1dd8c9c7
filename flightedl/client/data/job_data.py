"""Training data and evaluations of one session."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
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
from flightedl.client.data.slices import Slices
from flightedl.client.participation import Participation
from flightedl.client.process import TrainerProcess
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.data_urls import fixed_parts, is_below
from flightedl.domain.exactly_once.accumulation import described_pushes
from flightedl.domain.groups.lanes import GroupData
from flightedl.domain.groups.numbered import NumberedBatches
from flightedl.domain.groups.plan import Remainder, RoundPlan
from flightedl.domain.groups.shuffling import advice_of, order_of
from flightedl.domain.queue.drawing import SIZE_BYTES
from flightedl.domain.retries import PATIENT, fault_of
from flightedl.domain.trainer.acknowledged import AcknowledgedLoop
from flightedl.domain.trainer.feed import Ask
from flightedl.domain.trainer.readings import BatchLoop
from flightedl.errors import DataError, UsageError, exit_code_of, is_clean
from flightedl.formats.chunk_index import ChunkIndex
from flightedl.formats.dataset_spec import schema_of, spec_of
from flightedl.formats.mixed_layout import group_data, is_drawable
from flightedl.formats.reader import Decode, DecodedChunks
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
        self._moved = dict(process.data_moved)
        self._dataset: Dataset | None = None
        #: Batches of the declared data's tasks (see ``DeclaredDataset``), and True if pushes may be short.
        self._task_batches: tuple[list[tuple[int, int]], bool] = [], False
        self._push_every = 1
        #: Data of a group. This field and ``_dataset`` are never both set.
        self._group: GroupDataset | NumberedDataset | None = None
        self._attendance: GroupAttendance | None = None
        #: Feed of the current evaluation.
        self._evaluation: TaskFeed | None = None

    def declare(self, declaration: DatasetDeclaration, reading: Reading, slices: Slices | None = None) -> Dataset:
        """Declare the training data. Raises the same errors as ``Job.dataset``."""
        if slices is not None:
            declaration = _in_slices(declaration, slices)
        if is_drawable(declaration):
            declaration = replace(declaration, shuffle_bytes=reading.shuffling.size_bytes)
        elif reading.has_shuffle_bytes:
            raise UsageError("shuffle_bytes= applies to files that are read with shuffle=True: leave it out")
        declaration = self._admitted(declaration, reading.data_moved)
        read_as = self._reader(declaration, reading.decode)
        declared = self._process.ask_master("declare_dataset", encode(declaration), DeclaredDataset)
        sys.stderr.writelines(f"flightedl: shuffle=True: {each}\n" for each in declared.advice[1:])
        self._task_batches = declared.task_batches, reading.short_pushes
        if slices is None:
            self._require_long_pushes()
        else:
            self._require_full_batches(declared, slices)
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
            may_lose=reading.may_lose,
            slices=slices,
        )
        return self._dataset

    def expect_pushes(self, mode: Mode) -> None:
        """Report the mean number of batches in a push as soon as the data and the mode are known.

        Raises:
            UsageError: it is less than half of what the mode demands.
        """
        self._push_every = getattr(mode, "push_every", 1)
        self._require_long_pushes()

    def _require_long_pushes(self) -> None:
        text, is_short = described_pushes(self._task_batches[0], self._push_every)
        if text:
            self._report_mean(text, "batches", "a lower push_every", is_short=is_short)

    def _require_full_batches(self, declared: DeclaredDataset, slices: Slices) -> None:
        """Report the mean number of local steps. Raises UsageError if it is less than half of what the model has."""
        batches = sum(batch_count * task_count for batch_count, task_count in self._task_batches[0])
        if not batches:
            return
        mean = min(declared.record_count / batches / slices.size, float(slices.every))
        text = f"with {slices.every} local steps, an outer batch has {mean:.1f} on average"
        self._report_mean(text, "records", "fewer local steps", is_short=2 * mean < slices.every)

    def _report_mean(self, text: str, parts: str, remedy: str, *, is_short: bool) -> None:
        """Report a mean number of ``parts``. Raises UsageError if it is short, unless the script permits that."""
        if is_short and not self._task_batches[1]:
            raise UsageError(
                f"{text}, because it never has {parts} of two tasks: make the tasks larger (records_per_task= of "
                f"job.dataset), choose {remedy}, or permit it by job.dataset(..., short_pushes=True)"
            )
        sys.stderr.write(f"flightedl: {text}\n")

    def declare_for_group(
        self, declaration: DatasetDeclaration, reading: Reading, ranks: tuple[int, int], remainder: Remainder
    ) -> GroupDataset:
        """Declare the data of a group to which this process belongs. Raises the same errors as ``Job.dataset``."""
        process, (rank, world_size) = self._process, ranks
        declaration = self._admitted(declaration, reading.data_moved)
        batch_size = declaration.batch_size * (1 if reading.has_global_batch else world_size)
        if batch_size < world_size:
            raise UsageError(f"global_batch is {batch_size}, but must be at least {world_size}, the number of ranks")
        declared, data, reader = self._planned(declaration, reading.decode)
        order = order_of(data, batch_size, reading.shuffling)
        if remainder == "drop" and data.record_count(order.lanes) < batch_size:
            raise UsageError(
                f"an epoch has fewer records ({data.record_count(order.lanes)}) than a global batch ({batch_size}), "
                'so remainder="drop" would leave out all: make it smaller'
            )
        advice = advice_of(data, order, batch_size, world_size, reading.shuffling)
        if rank == 0:
            sys.stderr.writelines(f"flightedl: {line}\n" for line in (advice.text, *advice.warnings))
        mixture = f" {declaration.mixture} {declaration.stop}" if declaration.mixture else ""
        plan_from = partial(
            RoundPlan,
            data.record_count,
            epochs=declaration.epochs,
            order=order,
            world_size=world_size,
            rank=rank,
            batch_size=batch_size,
            remainder=remainder,
        )
        # Ranks may read the same data, but must still be different ranks of the group's start.
        launched = ranks if (found := rank_and_size("auto")) == (0, 1) else found
        if process.own_master is not None and process.own_master.size != launched[1]:
            raise UsageError(
                f"this session began as one of {process.own_master.size} ranks, but the group has {launched[1]}: call "
                "torch.distributed.init_process_group before fe.connect(), or set FLIGHTEDL_ETCD"
            )
        plan = f"a global batch of {batch_size}, remainder={remainder!r} and {world_size} data ranks"
        self._attendance = GroupAttendance(process, *launched, plan)
        self._group = GroupDataset(
            declared,
            xxhash.xxh3_64_hexdigest(f"{declared.index_hash}{mixture}".encode()),
            lambda start: plan_from(start=start),
            data.seed,
            reading.shuffling,
            reader,
            rank,
            self._attendance,
            process.progress.batch,
            process.probe.turn,
            process.waiting,
            lambda: self._files.trouble,
            explicit_commit=reading.explicit_commit,
            read_ahead_bytes=reading.read_ahead_bytes,
            transforming=reading.transforming,
            mixed_chunks=advice.mixed_chunks,
            may_lose=reading.may_lose,
        )
        return self._group

    def declare_numbered(self, declaration: DatasetDeclaration, reading: Reading) -> NumberedDataset:
        """Declare data whose batches the script requests by number. Raises the same errors as ``Job.dataset``."""
        declaration = self._admitted(declaration, reading.data_moved)
        declared, data, reader = self._planned(declaration, reading.decode)
        order = order_of(data, 1, reading.shuffling)
        batches = NumberedBatches(
            data.record_count(1), epochs=declaration.epochs, order=order, batch_size=declaration.batch_size
        )
        process = self._process
        self._group = NumberedDataset(
            declared,
            batches,
            lambda step: reading.transforming.of(next(reader.read([step])), partial(reader.place, step)),
            process.progress.batch,
            process.waiting,
            lambda: self._files.trouble,
        )
        return self._group

    def _admitted(self, declaration: DatasetDeclaration, data_moved: Mapping[str, str]) -> DatasetDeclaration:
        """Remember how this process accesses the files, and tell the master how to.

        Raises:
            UsageError: a moved folder has nothing to do with the declared URLs.
        """
        places = ["/".join(fixed_parts(url)).removeprefix("file://") for url in declaration.urls]
        for old, new in data_moved.items():
            pairs = [(place, folder) for place in places for folder in (old, new)]
            if not any(is_below(f"{a}/", b) or is_below(f"{b}/", a) for a, b in pairs):
                raise UsageError(f"data_moved={{{old!r}: {new!r}}}: no file of the dataset is in either folder")
        self._moved.update(data_moved)
        self._files.declare(declaration.urls, self._moved)
        return replace(declaration, data_moved=self._moved)

    def _planned(
        self, declaration: DatasetDeclaration, decode: Decode | None
    ) -> tuple[DeclaredDataset, GroupData, PieceReader]:
        """Declare data whose batches this process plans itself. Return its properties and its reader."""
        process = self._process
        # Neither the master nor the tasks depend on the batch size, so it may change at the next start.
        declared = process.ask_master("declare_dataset", encode(replace(declaration, batch_size=1)), DeclaredDataset)
        index = persistently(process.waiting(), self._index)
        if index.content_hash() != declared.index_hash:
            raise DataError("the master has another index of the dataset than the one declared: start this rank again")
        seed = declaration.seed % 2**64 if declaration.shuffle else None
        data = group_data(index, replace(declaration, urls=declared.declaration.urls), seed)
        reader = PieceReader(self._files, index, data, spec_of(declaration), decode, process.progress.skipped)
        return declared, data, reader

    def _index(self) -> ChunkIndex:
        with self._process.servers.master().get(
            b'{"verb": "index"}', timeout_s=_INDEX_S, schema=PIECES_SCHEMA
        ) as stream:
            return index_from_pieces(batch for batch, _ in stream if batch is not None)

    @property
    def explicit_done(self) -> bool:
        return self._dataset is not None and self._dataset.explicit_done

    def require_undeclared(
        self, why: str = "this job already has its dataset: declare it once, before the training loop"
    ) -> None:
        if self._dataset is not None or self._group is not None:
            raise UsageError(why)

    def evaluate(
        self, name: str, declaration: DatasetDeclaration, decode: Decode | None, measure: Measure
    ) -> dict[str, float]:
        """Measure this trainer's share of an evaluation's data. Raises the same errors as ``Job.evaluate``."""
        declaration = self._admitted(declaration, {})
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
            size_bytes = SIZE_BYTES if declared.drawing is None else declared.drawing.size_bytes
            more: dict[str, Any] = {
                "schema": schema_of(declared),
                "decode": decode,
                "decoded": DecodedChunks(size_bytes),
            }

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
            self._dataset.fail_current(current, last, place_of(error), fault_of(error) or "code")

    def stopped(self) -> None:
        """Record that this trainer has stopped the job."""
        if self._attendance is not None:
            self._attendance.is_stopping = True

    @property
    def is_of_group(self) -> bool:
        return self._group is not None

    @property
    def group_batch(self) -> tuple[int, int] | None:
        """Number of records and epoch of the current batch in a rank's loop; None if no batch is current."""
        return None if self._group is None else self._group.current

    def leave_group(self, error: BaseException | None) -> None:
        """Leave the group if this process is one of its ranks. See ``GroupAttendance.leave``.

        Raises the error that has ended a loop if the script ends as if there had been none.
        """
        # A NumberedDataset keeps no error, because the script requests a failed batch again.
        of_loop: Exception | None = getattr(self._dataset or self._group, "error", None)
        is_hidden = of_loop is not None and is_clean(exit_code_of(error))
        if self._attendance is not None:
            self._attendance.leave(of_loop if is_hidden else error)
        if is_hidden and of_loop is not None:
            raise of_loop

    def close(self) -> None:
        self._closing.set()
        if self._dataset is not None:
            self._dataset.close()
        if self._group is not None:
            self._group.close()


def _in_slices(declaration: DatasetDeclaration, slices: Slices) -> DatasetDeclaration:
    """Return the declaration of outer batches, whose slices have the declared batch size."""
    if declaration.steps_per_batch > 1:
        raise UsageError("steps_per_batch would repeat all local steps of a batch: leave it out, or the local steps")
    slices.size = declaration.batch_size
    return replace(declaration, batch_size=slices.size * slices.every, local_steps=slices.every)
