"""A trainer's session with its job: everything the user's script gets from ``fe.connect()``.

The session is a context manager: leaving it hands back what is held and ends the lease, so that the others learn at
once; leaving it by an exception also reports the batch at which it happened. What it is made of is in ``process``, what
it has of the job's data in ``data.job_data``, and of its model in ``model.job_model``.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat, Unpack, cast

import numpy as np
import numpy.typing as npt

from flightedl.client import arguments
from flightedl.client.data.evaluation import Measure
from flightedl.client.data.job_data import JobData
from flightedl.client.data.options import Reading, ReadingOptions
from flightedl.client.data.ranks import rank_and_size
from flightedl.client.data.transforms import require_no_reader
from flightedl.client.model.job_model import JobModel
from flightedl.client.model.parameters import Parameters
from flightedl.client.once import Once, OnceNames
from flightedl.client.participation import Participation
from flightedl.client.process import TrainerProcess
from flightedl.client.tables.table import Table
from flightedl.config import TrainerSettings, settings
from flightedl.domain.consistency.modes import Mode
from flightedl.domain.model.initial import Init
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.retries import is_transient
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.ending import JobEnd
from flightedl.domain.trainer.membership import TrainerMembership
from flightedl.errors import FlightedlError, UsageError
from flightedl.formats.reader import Decode
from flightedl.messages.declarations import DatasetDeclaration
from flightedl.messages.tasks import StopRequest
from flightedl.process import tuning as process_tuning
from flightedl.recording.recorded import recorded

_CLOSED = "it was closed, as at the end of its `with` block"
_DONE_BY_STEPS = (
    "with parameters, a batch is done when the servers have it: explicit_done is for jobs that have data alone"
)


def connect(
    etcd: str | None = None,
    job: str | None = None,
    *,
    job_over: Callable[[], str] = lambda: "",
    begin_again: str = "to train again, give the job another name",
    **more: Any,
) -> Job:
    """Join a job as a trainer.

    Args:
        etcd: ``host:port`` of etcd; else ``FLIGHTEDL_ETCD``.
        job: The job's name; else ``FLIGHTEDL_JOB``.
        job_over: Why the servers will never answer again, for who has started them; empty: they may.
        begin_again: What to do who wants to train again what is done.
        **more: Other fields of :class:`flightedl.config.TrainerSettings`.

    Raises:
        UsageError: a setting is wrong.
        UnavailableError: etcd cannot be reached.
    """
    require_no_reader()
    process_tuning.apply()
    process_tuning.defer_pandas()
    return Job(settings(TrainerSettings, etcd=etcd, job=job, **more), job_over=job_over, begin_again=begin_again)


class Job:
    """One trainer's session. Use it as a context manager; its methods belong to the thread that made it."""

    def __init__(
        self,
        chosen: TrainerSettings,
        *,
        job_over: Callable[[], str] = lambda: "",
        begin_again: str = "",
    ) -> None:
        """Join a job.

        Args:
            chosen: The settings.
            job_over: Why the servers will never answer again; empty: they may.
            begin_again: What to do who wants to train again what is done.
        """
        self._settings = chosen
        self._process = TrainerProcess(chosen, job_over)
        process = self._process
        self._participation = Participation(
            process.registration,
            process.servers,
            process.waiting,
            self._began_anew,
            process.progress.batch,
            process.request_stream,
            recorded(process.recorder, {"trainer": process.trainer}, TrainerMembership),
            recorded(process.recorder, {}, JobEnd),
        )
        self._participation.probe = process.probe
        self._model = JobModel(process, self._participation)
        self._data = JobData(process, self._participation, self._require_open, begin_again, self._model.look_ahead)
        self._once = OnceNames(process.coordinator, process.keys, process.registration, process.waiting, self._life)
        process.progress.shares_model = self._shares_model
        #: Why this session is over; empty: it is not.
        self._closed = ""

    # what the user calls

    @property
    def name(self) -> str:
        """The job's name."""
        return self._settings.job

    @property
    def output_dir(self) -> Path:
        """Where results belong: the launcher's output directory, else the current directory."""
        return Path(self._settings.output_dir or ".")

    def dataset(
        self,
        urls: str | Path | Sequence[str | Path],
        *,
        batch_size: int,
        epochs: int | None = 1,
        shuffle: bool = False,
        seed: int = 0,
        columns: str | Sequence[str] | None = None,
        filter: Sequence[tuple[str, str, Any]] | None = None,  # noqa: A002 - the word users know from Parquet readers
        format: str = "",  # noqa: A002 - likewise
        records_per_task: int = 0,
        on_corrupt: str = "fail",
        follow: bool = False,
        steps_per_batch: int = 1,
        **reading: Unpack[ReadingOptions],
    ) -> Any:
        """Declare the job's training data: the same in every trainer, whose share of it comes by iterating.

        With ``group``, the trainers are the ranks of one training whose model is elsewhere, as with DDP or FSDP. They
        take the data in rounds of one batch for each rank, all ranks get the same number of batches, and the position
        in the data is saved with the model (``GroupDataset.state_dict``). Without it, each trainer takes what it can.

        With ``follow``, files that match later join as new tasks, for good and in the order in which they come. The
        master looks every few seconds (``FLIGHTEDL_FOLLOW_EVERY_S``) and takes a file when two looks find it the same,
        so one that is being written is left alone. Names that begin with ``_`` or ``.`` are left out. The last epoch
        ends when a file ``_END`` lies in the directory of each pattern, or a trainer calls ``Dataset.end``; an earlier
        one when all that is there is done. A file that cannot be used is left out, told by ``flightedl status`` and,
        if it is still left out at the end, by exit code 4 of ``flightedl run``. ``flightedl status`` also tells of one
        that is removed or changed after it was taken; whoever has to read it is refused.

        Args:
            urls: One or more URLs or globs, on any fsspec file system; relative paths are the trainer's.
            batch_size: Records of a batch, at most; a batch never spans two tasks.
            epochs: Passes over the data, for the whole job; None: endless.
            shuffle: Dispatch tasks, and order the records within each, by ``seed`` and epoch.
            seed: Of the shuffling. In a job that is resumed, both count from the first epoch that has not begun.
            columns: Only these.
            filter: (column, operator, value) conditions that records must meet.
            format: Name of the format; empty: by the files' names.
            records_per_task: How many records make a task, about; 0: one chunk (row group, record batch) is one.
            on_corrupt: "fail" or "skip" corrupt chunks.
            follow: More files are to come; see above.
            steps_per_batch: Each batch is handed out so many times in a row, for a step each time:
                ``Dataset.step_of_batch`` says which one it is. Each is done once, like batches of their own.
            **reading: Options that each trainer may choose for itself, and those of groups:

                decode: For RecordIO: makes columns of a record's bytes.

                explicit_done: Batches count as done when ``Dataset.done`` says so, not when the next one is asked for;
                for jobs without parameters.

                group: "auto" for the process group of torchrun, ``torch.distributed`` or JAX; (rank, number of ranks)
                among which data is shared, or a dimension of a DeviceMesh, if some processes need equal batches;
                "torchft" for batches by number.

                remainder: With ``group``: what becomes of records that fill no round of full batches. "split" spreads
                them evenly, "drop" leaves them out, and "pad" repeats records of the epoch's beginning.

                explicit_commit: With ``group``: rounds count for ``state_dict`` when ``commit`` names them.

                read_ahead_mb: Memory for batches that this trainer reads ahead. The next chunk is always read, however
                large it is.

                transform: Converts each batch before the loop receives it, concurrently with the loop.

                readers: Processes of this trainer that run ``transform``; 0: a thread runs it. They import the module,
                or run the script, that has it.

        Returns:
            A ``Dataset``; with ``group``, a ``GroupDataset``, and with "torchft" a ``NumberedDataset``.

        Raises:
            DataError: a file is missing, unreadable, or of another schema than the others.
            DeclarationError: the job already has a different dataset.
        """
        declaration = arguments.dataset_declaration(
            urls=urls,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            columns=columns,
            filter=filter,
            format=format,
            records_per_task=records_per_task,
            on_corrupt=on_corrupt,
            follow=follow,
            steps_per_batch=steps_per_batch,
        )
        return self._declare(declaration, reading)

    def mixture(
        self, sources: Mapping[str, float], *, batch_size: int, seed: int = 0, stop: str = "first", **more: Any
    ) -> Any:
        """Declare training data that is a mixture of several sources, in place of ``dataset``.

        Every task has records of all sources in proportion to their weights, shuffled by ``seed``, epoch and task.

        Args:
            sources: URL or glob -> weight. Files that several match belong to the first one.
            batch_size: Records of a batch, at most.
            seed: Of the shuffling.
            stop: When an epoch ends: "first": when the first source is used up, which leaves out records of the
                others; "all": when every record was given once, and what remains at the end is not in proportion;
                "repeat": when every record was given, those of the shorter sources repeatedly.
            **more: Other arguments of ``dataset``, apart from ``shuffle`` and ``follow``.

        Raises:
            DataError: as of ``dataset``; or a source has no records.
            DeclarationError: the job already has a different dataset.
        """
        reading = {name: more.pop(name) for name in ReadingOptions.__annotations__.keys() & more.keys()}
        return self._declare(
            arguments.mixture_declaration(sources, stop, batch_size, seed, more), cast("ReadingOptions", reading)
        )

    def indexed(
        self,
        n: int | Mapping[range, float],
        get: Callable[[Any], Any],
        *,
        batch_size: int,
        epochs: int | None = 1,
        shuffle: bool = False,
        seed: int = 0,
        columns: str | Sequence[str] = (),
        batched: bool = False,
        records_per_task: int = 0,
        steps_per_batch: int = 1,
        stop: str = "first",
        **reading: Unpack[ReadingOptions],
    ) -> Any:
        """Declare training data whose elements a function returns by index, in place of ``dataset``.

        Suits map-style datasets, such as those of PyTorch: ``job.indexed(len(ds), ds.__getitem__, ...)``. Only indices
        are handed out, so every trainer needs the same elements. Epochs, groups and positions work as for files.

        Args:
            n: Number of elements, whose indices are 0 to n - 1; or weights by ranges of indices, for a mixture.
            get: Returns the element of an index: a dict of columns, a tuple, or a single value. Arrays and tensors
                become tensors. It runs where a ``transform`` does: concurrently with the loop, or in ``readers``.
            batch_size: Elements of a batch, at most.
            epochs: As in ``dataset``.
            shuffle: Hand the elements out in another random order in each epoch.
            seed: Seed of the shuffling.
            columns: Names of the parts of a tuple; by default "0", "1", ...
            batched: ``get`` takes a list of indices, and returns a list of elements, a dict of columns, or a
                ``pyarrow.RecordBatch``.
            records_per_task: Elements of a task; 0: about 1,024, and less if there would be few tasks.
            steps_per_batch: As in ``dataset``.
            stop: End of a mixture's epoch, as in ``mixture``.
            **reading: As in ``dataset``, without ``decode`` and ``transform``.

        Raises:
            UsageError: an argument is wrong.
            DataError: raised by the loop if ``get`` fails, or elements do not form columns; names the index.
            DeclarationError: the job already has a different dataset.
        """
        declaration, by_index = arguments.indexed_declaration(
            n,
            get,
            columns=columns,
            batched=batched,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            stop=stop,
            has_rounds=reading.get("group") is not None,
            records_per_task=records_per_task,
            steps_per_batch=steps_per_batch,
        )
        if wrong := sorted(reading.keys() & {"decode", "transform"}):
            raise UsageError(f"job.indexed has no {wrong[0]}=: let get do it")
        return self._declare(declaration, {**reading, "transform": by_index})

    def _declare(self, declaration: DatasetDeclaration, given: ReadingOptions) -> Any:
        self._require_open()
        self._data.require_undeclared()
        reading = Reading(given)
        if reading.explicit_done and self._model.is_declared:
            raise UsageError(_DONE_BY_STEPS)
        if reading.group is None:
            return self._data.declare(declaration, reading)
        if self._model.is_declared:
            raise UsageError("a group trains a model of its own: give either group= or job.parameters, not both")
        remainder = reading.remainder_for(declaration)
        if reading.is_numbered:
            return self._data.declare_numbered(declaration, reading)
        atexit.register(self._leave_at_exit)
        ranks = rank_and_size(reading.group, self._settings.process_name)
        return self._data.declare_for_group(declaration, reading, ranks, remainder)

    def parameters(
        self,
        initial: Any,
        *,
        optimizer: Optimizer | str | None = None,
        mode: Mode | str | None = None,
        wire: str = "",
        error_feedback: bool = False,
        dtypes: Mapping[str, str | type[np.generic]] | None = None,
    ) -> Parameters:
        """Declare the model: the same in every trainer. One trainer's values become the first ones.

        Args:
            initial: name -> float array of any shape, or nested: dicts, lists, tuples and named tuples of arrays, and
                with JAX all of its pytrees (``Parameters.tree`` gives them back). Its values count only where this
                trainer is elected. Of float16 and bfloat16 (``ml_dtypes.bfloat16``) arrays the pservers keep a float32
                master copy, which they update and checkpoint; gradients and values travel and are seen with 16 bits.
            optimizer: What the pservers run, or the name of one whose settings all have defaults, such as "adam";
                default plain SGD with a learning rate of 0.01.
            mode: Consistency, or the name of a mode whose settings all have defaults; default ``Sync()``.
            wire: "bfloat16" or "float16": gradients and values of float32 parameters travel with 16 bits, rounded to
                nearest even; the pservers keep and update float32. A gradient beyond the range is a GradientError; a
                value beyond it arrives as infinity.
            error_feedback: With ``wire``: add what was rounded off a gradient to the next one. Costs this trainer
                float32 memory of the model's size.
            dtypes: name -> "float16", "bfloat16", "float32" or "float64": declare a parameter as that, whatever its
                array is.

        Returns:
            A mapping of arrays with the job's present values.

        Raises:
            UsageError: a parameter is not a float array, or not finite.
            DeclarationError: the job already has a different model.
        """
        self._require_open()
        if self._data.explicit_done:
            raise UsageError(_DONE_BY_STEPS)
        return self._model.declare(
            initial, optimizer=optimizer, mode=mode, wire=wire, error_feedback=error_feedback, dtypes=dtypes
        )

    def table(
        self,
        name: str,
        dim: int,
        *,
        optimizer: Optimizer | str,
        init: Init | None = None,
        **more: Any,
    ) -> Table:
        """Declare an embedding table, before ``parameters``: the same in every trainer.

        Without a dense model ``parameters`` need not be called: then the first lookup or batch declares the tables, in
        the default mode; ``job.parameters({}, mode=...)`` chooses another one.

        Args:
            name: Of the table.
            dim: Elements of a row.
            optimizer: Of its rows: SGD, Momentum, Adagrad, RowAdagrad, Adam (rows without a gradient do not move),
                RowAdam or Ftrl; or the name of one whose settings all have defaults.
            init: What a row begins with: Uniform, Normal, Zeros or Constant; default zeros.
            **more: ``dtype``, ``rounding``, ``seed``, ``unknown``, ``admit_after``, ``admission``, ``sketch_bytes`` and
                ``evict``, see ``domain.tables.spec``.

        Raises:
            UsageError: a setting makes no sense, or ``parameters`` was called before.
            DeclarationError: this session, or the job, has declared it otherwise.
        """
        self._require_open()
        if init is not None:
            more["init"] = init
        return self._model.table(TableSpec(name, dim, Optimizer.chosen(optimizer), **more))

    def lookup(self, ids: Mapping[Table, Any]) -> dict[Table, npt.NDArray[np.float32]]:
        """Rows of several tables, in one round trip for all of them.

        Args:
            ids: Table -> what its ``pull`` takes as ids.

        Returns:
            Table -> what its ``pull`` returns: (n, dim) float32.

        Raises:
            UsageError: as of ``Table.pull``; nothing was sent.
            UnavailableError: a pserver stayed away for longer than ``give_up_s``.
        """
        self._require_open()
        return self._model.look_up(ids)

    def step(self) -> None:
        """Push what was pushed to tables for the current batch: what ``model.step`` does, without a dense model.

        Raises:
            UsageError: no batch is current, or it was already pushed.
            UnavailableError: a pserver stayed away for longer than ``give_up_s``.
        """
        self._require_open()
        self._model.require_declared().step_rows()

    def evaluate(
        self,
        urls: str | Path | Sequence[str | Path],
        measure: Measure,
        *,
        batch_size: int,
        name: str = "evaluation",
        columns: str | Sequence[str] | None = None,
        filter: Sequence[tuple[str, str, Any]] | None = None,  # noqa: A002 - as in ``dataset``
        format: str = "",  # noqa: A002 - likewise
        decode: Decode | None = None,
    ) -> dict[str, float]:
        """Measure other data, together with all trainers that call this; the training data is not touched.

        Each trainer gets a part of the batches; a trainer that calls it alone gets all. It returns when every batch is
        measured, by whoever, and gives all callers the same result. One that calls it later gets the result at once.

        Args:
            urls: URLs or globs of the data, as of ``dataset``.
            measure: Makes metrics of a batch (``pyarrow.RecordBatch``); they are averaged, weighted by records.
            batch_size: Records of a batch, at most.
            name: Tells one evaluation from another: use another one for each moment, such as ``f"epoch-{n}"``.
            columns: Only these.
            filter: (column, operator, value) conditions that records must meet.
            format: Name of the format; empty: by the files' names.
            decode: For RecordIO: makes columns of a record's bytes.

        Returns:
            name -> mean over all records.

        Raises:
            DataError: a file is missing, unreadable, or of another schema than the others.
            DeclarationError: the evaluation of this name has other data.
        """
        self._require_open()
        arguments.function_of("measure", measure)
        if decode is not None:
            arguments.function_of("decode", decode)
        declaration = arguments.dataset_declaration(
            urls=urls, batch_size=batch_size, columns=columns, filter=filter, format=format
        )
        return self._data.evaluate(name, declaration, measure, decode)

    def log(self, **metrics: SupportsFloat) -> None:
        """Report metrics of the current batch; ``status`` and the progress bar show their mean over records.

        With an output directory they are also written to files of it, see ``curves.files``.
        """
        current = self._participation.current
        values = arguments.metrics_of(metrics)
        if current is not None:
            self._process.progress.metrics(values, current.record_count, current.batch.epoch)
        elif (of_group := self._data.group_batch) is not None:
            self._process.progress.metrics(values, *of_group)
        else:
            self._process.progress.metrics(values, 1)

    def wait_for_end(self) -> None:
        """Return when every task of every epoch is done, by whichever trainer; a finished loop means the same.

        What ``model.pull`` brings from then on is what was trained. If a pserver dies that late and lost something, it
        raises BegunAnewError: the lost part is done again, by trainers that are started again.
        """
        self._require_open()
        waiting, requests = self._process.waiting(), self._process.request_stream()
        while True:
            try:
                if self._participation.ask(requests).outcome == "epochs_done":
                    break
            except FlightedlError as error:
                if not is_transient(error):
                    raise
                waiting.because(error)
            else:
                waiting.patiently("the other trainers to finish their tasks")
            waiting.pause()
        requests.close_idle()
        waiting.over()

    def stop(self, reason: str = "its script called job.stop()") -> None:
        """End the whole job before all epochs are done: an early stop, of one that trains long enough, say.

        The master hands out no new tasks. Each trainer's loop ends when the trainer has finished the tasks that it has
        begun, at most two; a trainer may also leave its loop at once. Work that was lost with a pserver is trained
        again first, so at least one trainer should stay in its loop: if none asks for work for 30 s, the job fails and
        names the tasks. The rest of the data stays untrained. That is not an error, and ``--resume`` can go on with it
        from the last checkpoint. Any trainer may call this, also twice.

        Args:
            reason: Shown by ``flightedl status`` and at the end of ``flightedl run``, beside this trainer's name; at
                most 256 characters of it.

        Raises:
            UsageError: the session is over, or the reason is empty.
        """
        self._require_open()
        chosen = arguments.name_of("the reason", reason)
        self._process.tell_master("stop", StopRequest, reason=chosen[:256], name=self._settings.process_name)

    def save_model(
        self,
        url: str | Path,
        *,
        format: str = "",  # noqa: A002 - users' word
        server: bool = False,
        once: Once | None = None,
    ) -> bool:
        """Write the model as one file for others to load; call it in all trainers, and one of them does it.

        The n-th call for a URL within an epoch is the same request in all trainers. A later request for the same URL
        replaces the file.

        Args:
            url: Path or URL of the file, ending in .safetensors, .npz or .arrow.
            format: Of the file, where its name does not say it.
            server: Let the master take the values from a new checkpoint, instead of this trainer's copy of them.
            once: What ``Job.once`` returned: write only if this trainer still has that name. Not needed for the file to
                be written by one trainer.

        Returns:
            True in the trainer that wrote it (or asked the master to), False in the others.

        Raises:
            UsageError: there is no model, the session is over, the format is not known, or (``server``) the job keeps
                no checkpoints.
            UnavailableError: the file could not be written.
            FencedError: ``once`` is another trainer's by now; the file is as it was.
        """
        self._require_open()
        target = arguments.url_of("url", url)
        if not isinstance(once, Once | None):
            raise UsageError(f"once is {once!r}: give what job.once returned")
        return self._model.save(target, format, server=server, once=once)

    def once(self, name: str) -> Once:
        """True in one trainer of the job: for what must be done once, such as writing the final report.

        ::

            if won := job.once("report"):
                won.publish(job.output_dir / "report.json", report)

        A winner that dies, or is frozen or cut off for longer than its lease, before its session ends cleanly gives the
        name back; another trainer may win it and do all of it again. A frozen one that wakes up does not notice:
        ``won.require()`` raises FencedError then, and ``won.publish`` and ``save_model(once=won)`` leave the files of
        its successor alone. Other effects of the block are not guarded, so let them bear a repetition.
        """
        self._require_open()
        return self._once.claim(arguments.name_of("the name given to once", name))

    @property
    def trainer(self) -> str:
        """This trainer's id."""
        return self._process.trainer

    @property
    def generation(self) -> int:
        """This trainer's generation."""
        return self._process.generation

    def _life(self) -> int:
        return self._process.servers.life

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(self._closed)

    def _shares_model(self) -> bool:
        """True if the script may train one model together with other trainers, as far as can be seen."""
        is_known = self._model.is_declared or self._data.explicit_done or self._once.is_used
        return is_known or self._data.is_of_group or has_process_group()

    def _began_anew(self) -> None:
        self._data.registered_again()

    # the end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, FlightedlError):
            self._data.raised(error)
        self._end(_CLOSED, error)

    def _leave_at_exit(self) -> None:
        """End the session of a rank whose script has ended without closing it."""
        try:
            self._end("its script has ended", getattr(sys, "last_value", None))
        except FlightedlError as error:
            # An exception would leave the exit code as it is, and the launcher has to see that this rank failed.
            sys.stdout.flush()
            sys.stderr.write(f"flightedl: {error}\n")
            sys.stderr.flush()
            os._exit(1)

    def close(self, why: str = _CLOSED) -> None:
        """Hand back what is held and end the lease. Closing twice is fine.

        Raises:
            FencedError: this process is a rank of a group whose present start is over.
        """
        self._end(why, None)

    def _end(self, why: str, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = f"this session is over: {why}; connect again to go on"
        atexit.unregister(self._leave_at_exit)
        try:
            self._data.leave_group(error)
        finally:
            self._data.close()
            self._model.close(self._closed)
            self._once.keep()
            self._process.close()


def has_process_group() -> bool:
    """True if torch.distributed is initialized, or a launcher has given this process a rank."""
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)
    names = os.environ.keys()  # noqa: TID251 - other launchers set them, such as torchrun
    return is_initialized() or not names.isdisjoint({"RANK", "WORLD_SIZE"})
