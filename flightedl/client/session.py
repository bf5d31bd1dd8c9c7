"""A trainer's session with its job: everything that a script gets from ``fe.connect()``.

The session is a context manager. When it exits, it returns unfinished tasks and ends the lease, so that other processes
notice immediately; after an exception, it also reports the batch at which the exception occurred. ``process`` contains
the session's components, ``data.job_data`` its access to the job's data, and ``model.job_model`` its access to the
model.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, SupportsFloat, Unpack, cast

import numpy as np
import numpy.typing as npt

from flightedl.client import arguments
from flightedl.client.data.evaluation import Measure
from flightedl.client.data.job_data import JobData
from flightedl.client.data.options import Reading, ReadingOptions, batch_size_of, decoding
from flightedl.client.data.ranks import rank_and_size
from flightedl.client.data.transforms import require_no_reader
from flightedl.client.model.job_model import JobModel
from flightedl.client.model.parameters import Parameters
from flightedl.client.model.saving import Saved
from flightedl.client.once import Once, OnceNames
from flightedl.client.participation import Participation
from flightedl.client.process import TrainerProcess
from flightedl.client.tables.table import Table
from flightedl.config import TrainerSettings, settings
from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.model.initial import Init
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.retries import is_transient
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.ending import JobEnd
from flightedl.domain.trainer.membership import TrainerMembership
from flightedl.errors import FlightedlError, UsageError, exit_code_of, is_clean
from flightedl.formats.reader import Decode
from flightedl.messages.declarations import DatasetDeclaration
from flightedl.messages.tasks import StopRequest
from flightedl.process import machine
from flightedl.process.ending import script_error, watch_exits
from flightedl.process.fork_guard import GUARD
from flightedl.recording.recorded import recorded

_CLOSED = "it was closed, for example at the end of its `with` block"
_DONE_BY_STEPS = (
    "with parameters, a batch is done when the servers have it: explicit_done is for jobs without parameters"
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
        etcd: ``host:port`` of etcd. The default is ``FLIGHTEDL_ETCD``. Without both, rank 0 starts a master for its
            group, which ends with the ranks, and no etcd is needed.
        job: The job's name. The default is ``FLIGHTEDL_JOB``.
        job_over: Returns the reason why the servers will never answer again, for callers that started the servers;
            empty while they may answer.
        begin_again: Advice for a user who wants to repeat a finished training.
        **more: Other fields of :class:`flightedl.config.TrainerSettings`.

    Raises:
        UsageError: a setting is invalid.
        UnavailableError: etcd or the group's master is unreachable.
    """
    GUARD.check()
    require_no_reader()
    watch_exits()
    machine.tune_trainer()
    return Job(settings(TrainerSettings, etcd=etcd, job=job, **more), job_over=job_over, begin_again=begin_again)


class Job:
    """One trainer's session. Use it as a context manager, and only on the thread that created it."""

    #: Exception that the script was handling when it opened the session.
    _handled_at_start: BaseException | None = None

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
            job_over: Returns the reason why the servers will never answer again; empty while they may answer.
            begin_again: Advice for a user who wants to repeat a finished training.
        """
        self._settings = chosen
        self._process = TrainerProcess(chosen, job_over)
        process = self._process
        self._participation = Participation(
            process.registration,
            process.servers,
            process.waiting,
            self._registered_again,
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
        #: Reason why this session has ended; empty while it is open.
        self._closed = ""
        self._handled_at_start = sys.exc_info()[1]

    # for the script

    @property
    def name(self) -> str:
        return self._settings.job

    @property
    def output_dir(self) -> Path:
        """Directory for results: the launcher's output directory if there is one, otherwise the current directory."""
        return Path(self._settings.output_dir or ".")

    def dataset(
        self,
        urls: str | Path | Sequence[str | Path],
        *,
        batch_size: int | None = None,
        epochs: int | None = 1,
        shuffle: bool = False,
        seed: int = 0,
        columns: str | Sequence[str] | None = None,
        filter: Sequence[tuple[str, str, Any]] | None = None,  # noqa: A002 - name known from Parquet readers
        format: str = "",  # noqa: A002 - common name
        records_per_task: int = 0,
        on_corrupt: str = "fail",
        follow: bool = False,
        steps_per_batch: int = 1,
        types: Mapping[str, str] | None = None,
        names: str | Sequence[str] = (),
        delimiter: str = "",
        null_values: str | Sequence[str] = (),
        **reading: Unpack[ReadingOptions],
    ) -> Any:
        r"""Declare the job's training data in every trainer. Iterating over the result yields this trainer's share.

        With ``group``, the trainers are the ranks of one training run whose model is managed elsewhere, for example by
        DDP or FSDP. They read the data in rounds of one batch per rank, and all ranks get the same number of batches.
        The position in the data is saved with the model (``GroupDataset.state_dict``). Without ``group``, each trainer
        gets as much data as it can process.

        With ``follow``, files that match the patterns later are added as new tasks, permanently and in order of
        arrival. The master scans every few seconds (``FLIGHTEDL_FOLLOW_EVERY_S``). It adds a file only if the file has
        not changed between two scans, so it adds no incomplete files. Names that begin with ``_`` or ``.`` are ignored.

        The last epoch ends when the directory of each pattern contains a file named ``_END``, or when a trainer calls
        ``Dataset.end``. Earlier epochs end as soon as all existing tasks are done.

        The URL of a Kafka topic, such as ``kafka://broker:9092/clicks``, stands for its messages. With ``follow``, new
        messages are added until a trainer calls ``Dataset.end``; otherwise, those that exist now are read.

        Unusable files are excluded and listed by ``flightedl status``; if any are still excluded at the end,
        ``flightedl run`` exits with code 4. ``flightedl status`` also lists files that were removed or changed after
        they had been added; reading them fails.

        Args:
            urls: One or more URLs or globs, on any fsspec file system. Relative paths refer to the trainer's directory.
            batch_size: Maximum number of records in a batch. Without ``group``, a batch never spans two tasks.
            epochs: Number of passes over the data, for the whole job; None for no limit.
            shuffle: Shuffle by ``seed`` and epoch. A task then consists of records of several chunks, which ``seed``
                draws once; tasks, and records within a task, are in another order in each epoch. With ``group``, mix
                the whole dataset; see ``lanes``.
            seed: Seed for shuffling. In a resumed job, ``shuffle`` and ``seed`` take effect with the first epoch that
                has not begun.
            columns: Columns to read; None for all.
            filter: (column, operator, value) conditions that records must meet.
            format: Name of the format; empty to derive it from the file names.
            records_per_task: Approximate records in a task; 0 to make each chunk (row group, record batch) one task,
                or with ``shuffle``, for at least 24 tasks, or as many as there are chunks. Groups have no tasks.
            on_corrupt: Policy for corrupt chunks: "fail" or "skip".
            follow: True if more files will be added; see above.
            steps_per_batch: Number of times in a row that each batch is yielded, for one step each. Each repetition
                counts as a separate batch; ``Dataset.step_of_batch`` is its number.
            types: Column -> name of its pyarrow type, such as {"zip": "string"}, for columns whose type is not to be
                inferred from the values or combined from the files. A value that does not fit is an error.
            names: For CSV and TSV files without a header line: names of the columns, as a list, or as text in which
                ranges stand for several names, such as "label,I1-I13,C1-C26". A file whose first line has exactly these
                names is read as one with a header.
            delimiter: For CSV and TSV: the ASCII character between fields; empty for "," or a tab.
            null_values: For CSV and TSV: texts that are nulls in all columns, such as "\N".
            **reading: Options in which trainers may differ, and options of groups:

                decode: For RecordIO, format="lines" and Kafka: converts the bytes of a record to columns. ``fe.decode``
                has ready functions.

                explicit_done: A batch is done when ``Dataset.done`` says so, not when the next one is requested; for
                jobs without parameters.

                group: "auto" for the process group of torchrun, ``torch.distributed`` or JAX; (rank, number of ranks)
                that share the data, or a dimension of a DeviceMesh, if some processes need equal batches; "torchft" for
                batches by number.

                global_batch: With ``group``: number of records in the batches of all ranks together, instead of
                ``batch_size``. The global batches are then the same for any number of ranks.

                remainder: With ``group``: treatment of records that do not fill a global batch. "split" makes the last
                batches smaller, "drop" leaves the records out, and "pad" repeats records.

                lanes: With ``group``: number of places at which the shuffled files are read side by side, which must
                divide the global batch; None to choose it. Without ``shuffle``, it suits files that were shuffled.

                shuffle_block: With ``group``: number of records, over all lanes, that are shuffled together; 2**18.

                shuffle_bytes: Memory of decoded records that bounds what ``shuffle`` mixes; 1 GiB. Must be the same in
                all trainers. A trainer holds up to two tasks of this size, and as much of chunks for the next tasks.
                With ``group``, it bounds ``lanes`` and ``shuffle_block``, and a rank may need up to four times as much.

                explicit_commit: With ``group``: rounds count for ``state_dict`` when ``commit`` names them.

                read_ahead_mb: Memory for batches that this trainer reads ahead. The next chunk is always read, however
                large it is.

                on_lost: "raise" to end the loop with a LostDataError, after the last epoch and the final checkpoint, if
                batches were set aside; "continue" to only print them. ``summary`` counts them either way.

                transform: Converts each batch before the loop receives it, concurrently with the loop.

                short_pushes: True if the mode's ``push_every`` may be far more than the batches of a task.

                readers: Number of processes of this trainer that run ``transform``; 0: a thread runs it. They import
                the module, or run the script, that defines it.

                data_moved: Folder -> its new place, such as ``{"/old": "/new"}``, if files are copies of those that the
                job has indexed. Keys and values are the same if the copies have the same names.

        Returns:
            A ``Dataset``; with ``group``, a ``GroupDataset``; with "torchft", a ``NumberedDataset``.

        Raises:
            DataError: a file is missing or unreadable, or its schema differs from the others.
            DeclarationError: the job has already declared a different dataset.
        """
        declaration = arguments.dataset_declaration(
            urls=urls,
            batch_size=batch_size_of(batch_size, reading),
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
            types=types,
            names=names,
            delimiter=delimiter,
            null_values=null_values,
        )
        return self._declare(declaration, reading)

    def mixture(
        self,
        sources: Mapping[str, float],
        *,
        batch_size: int | None = None,
        seed: int = 0,
        stop: str = "first",
        **more: Any,
    ) -> Any:
        """Declare training data that mixes several sources. Use this instead of ``dataset``.

        Every task contains records of all sources in proportion to their weights. The seed, epoch and task determine
        their order.

        Args:
            sources: URL or glob pattern -> weight. If several sources match a file, it belongs to the first one.
            batch_size: Maximum number of records in a batch.
            seed: Seed for shuffling.
            stop: End of an epoch. "first": when the first source is exhausted; the remaining records of the other
                sources are left out. "all": when every record has been yielded once; the last tasks are then not in
                proportion. "repeat": when every record has been yielded; records of shorter sources are repeated.
            **more: Other arguments of ``dataset``, apart from ``shuffle`` and ``follow``.

        Raises:
            DataError: for the same reasons as ``dataset``, or a source has no records.
            DeclarationError: the job has already declared a different dataset.
        """
        reading = {name: more.pop(name) for name in ReadingOptions.__annotations__.keys() & more.keys()}
        return self._declare(
            arguments.mixture_declaration(sources, stop, batch_size_of(batch_size, reading), seed, more),
            cast("ReadingOptions", reading),
        )

    def indexed(
        self,
        n: int | Mapping[range, float],
        get: Callable[[Any], Any],
        *,
        batch_size: int | None = None,
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
        """Declare training data whose elements a function returns by index. Use this instead of ``dataset``.

        Use this for map-style datasets, such as PyTorch's: ``job.indexed(len(ds), ds.__getitem__, ...)``. The master
        assigns only indices, so every trainer must have the same elements. Epochs, groups and positions work as they do
        for files.

        Args:
            n: Number of elements, whose indices are 0 to n - 1. For a mixture, weights by ranges of indices.
            get: Returns the element with an index: a dict of columns, a tuple, or a single value. Arrays and tensors
                become tensors. Like a ``transform``, it runs concurrently with the loop, or in ``readers``.
            batch_size: Maximum number of elements in a batch.
            epochs: As in ``dataset``.
            shuffle: Yield the elements in a different random order in each epoch.
            seed: Seed for shuffling.
            columns: Names of the parts of a tuple. The default is "0", "1", ...
            batched: True if ``get`` takes a list of indices, and returns a list of elements, a dict of columns, or a
                ``pyarrow.RecordBatch``.
            records_per_task: Number of elements in a task; 0 for about 1,024, or fewer if there would be few tasks.
            steps_per_batch: As in ``dataset``.
            stop: End of a mixture's epoch, as in ``mixture``.
            **reading: As in ``dataset``, except ``decode`` and ``transform``.

        Raises:
            UsageError: an argument is invalid.
            DataError: raised by the loop if ``get`` fails or elements do not form columns. Names the index.
            DeclarationError: the job has already declared a different dataset.
        """
        declaration, by_index = arguments.indexed_declaration(
            n,
            get,
            columns=columns,
            batched=batched,
            batch_size=batch_size_of(batch_size, reading),
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
        declaration, reading.decode = decoding(declaration, reading.decode)
        if reading.explicit_done and self._model.is_declared:
            raise UsageError(_DONE_BY_STEPS)
        if reading.group is None:
            return self._data.declare(declaration, reading, self._model.slices)
        if self._model.is_declared:
            raise UsageError("a group trains its own model: use either group= or job.parameters, not both")
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
        local_steps: int | None = None,
    ) -> Parameters:
        """Declare the model. Every trainer must make the same call. One trainer's values become the initial values.

        Args:
            initial: Name -> float array of any shape. May be nested: dicts, lists, tuples and named tuples of arrays,
                and with JAX any pytree (``Parameters.tree`` returns the values in this structure). Used only if this
                trainer is elected. Pservers keep a float32 master copy of float16 and bfloat16 (``ml_dtypes.bfloat16``)
                arrays, which they update and checkpoint; gradients and values have 16 bits.
            optimizer: The pservers' optimizer, or the name of an optimizer whose settings all have defaults, such as
                "adam". The default is plain SGD with a learning rate of 0.01.
            mode: Consistency mode, or the name of a mode whose settings all have defaults. The default is ``Sync()``.
            wire: "bfloat16" or "float16" to send gradients and values of float32 parameters with 16 bits, rounded to
                nearest even. The pservers store and update float32. A gradient that is out of range raises a
                GradientError; a value that is out of range arrives as infinity.
            error_feedback: True to add the rounding error of a gradient to the next gradient. Requires ``wire``, and
                float32 memory of the model's size in this trainer.
            dtypes: Name -> "float16", "bfloat16", "float32" or "float64", to declare a parameter with a dtype that
                differs from its array's.
            local_steps: Number of steps that each trainer makes on its own values before the difference counts as one
                gradient (DiLoCo, arXiv 2311.08105); see ``Parameters.local_step``. Batches of the dataset, which must
                be declared afterwards, then have so many slices of ``batch_size`` records, which the loop yields.

        Returns:
            A mapping of names to arrays with the job's current values.

        Raises:
            UsageError: a parameter is not a float array, or is not finite.
            DeclarationError: the job has already declared a different model.
        """
        self._require_open()
        if self._data.explicit_done:
            raise UsageError(_DONE_BY_STEPS)
        chosen_mode = Sync() if mode is None else Mode.chosen(mode)
        if local_steps is not None:
            arguments.positive("local_steps", local_steps)
            self._data.require_undeclared("declare a model with local steps before job.dataset: it changes the batches")
        self._data.expect_pushes(chosen_mode)
        return self._model.declare(
            initial,
            optimizer=optimizer,
            mode=chosen_mode,
            wire=wire,
            error_feedback=error_feedback,
            dtypes=dtypes,
            local_steps=local_steps,
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
        """Declare an embedding table. Every trainer must make the same call, before ``parameters``.

        A job without dense parameters need not call ``parameters``. The first lookup or batch then declares the tables
        in the default mode; to choose another mode, call ``job.parameters({}, mode=...)``.

        Args:
            name: The table's name.
            dim: Number of elements in a row.
            optimizer: Optimizer of the rows: SGD, Momentum, Adagrad, RowAdagrad, Adam (rows without a gradient do not
                move), RowAdam or Ftrl; or the name of an optimizer whose settings all have defaults.
            init: Initial values of rows: Uniform, Normal, Zeros or Constant. The default is zeros.
            **more: Settings of rows:

                dtype: "float32", "float16" or "bfloat16".

                rounding: "stochastic" or "nearest", for 16-bit rows.

                seed: Seed of the initial values.

                unknown: Result of reading an id without a row: its initial values ("init"), "zero" or "error".

                admit_after: Number of pushes of an id after which its row is created.

                admission: "exact" counts of these pushes, or a count-min "sketch" of ``sketch_bytes`` bytes.

                evict: Rules for the removal of rows (``fe.Evict``).

        Raises:
            UsageError: a setting is invalid, or ``parameters`` has already been called.
            DeclarationError: this session or the job has declared the table differently.
        """
        self._require_open()
        if init is not None:
            more["init"] = init
        return self._model.table(TableSpec(name, dim, Optimizer.chosen(optimizer), **more))

    def lookup(self, ids: Mapping[Table, Any]) -> dict[Table, npt.NDArray[np.float32]]:
        """Look up rows of several tables in one round trip.

        Args:
            ids: Table -> ids, in any form that its ``pull`` accepts.

        Returns:
            Table -> rows, in the form that its ``pull`` returns: (n, dim) float32.

        Raises:
            UsageError: for the same reasons as ``Table.pull``. Nothing was sent.
            UnavailableError: a pserver was unavailable for longer than ``give_up_s``.
        """
        self._require_open()
        return self._model.look_up(ids)

    def step(self) -> None:
        """Send the row gradients that were pushed for the current batch, like ``model.step`` without dense gradients.

        Raises:
            UsageError: no batch is current, or it has already been pushed.
            UnavailableError: a pserver was unavailable for longer than ``give_up_s``.
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
        format: str = "",  # noqa: A002 - as in ``dataset``
        decode: Decode | None = None,
        **text: Any,
    ) -> dict[str, float]:
        """Evaluate on other data, together with all trainers that call this. Training is not affected.

        The callers divide the batches among themselves; a single caller measures all of them. When every batch has been
        measured, all callers get the same result. Later callers get this result immediately.

        Args:
            urls: URLs or glob patterns of the data, as in ``dataset``.
            measure: Computes the metrics of a batch (``pyarrow.RecordBatch``). They are averaged, weighted by records.
            batch_size: Maximum number of records in a batch.
            name: Name of the evaluation. Use a different name each time, such as ``f"epoch-{n}"``.
            columns: Columns to read; None for all.
            filter: (column, operator, value) conditions that records must meet.
            format: Name of the format; empty to derive it from the file names.
            decode: For RecordIO and format="lines": converts the bytes of a record to columns.
            **text: ``types``, ``names``, ``delimiter`` and ``null_values``, as in ``dataset``.

        Returns:
            Name -> mean over all records.

        Raises:
            DataError: a file is missing or unreadable, or its schema differs from the others.
            DeclarationError: an evaluation with this name has other data.
        """
        self._require_open()
        arguments.function_of("measure", measure)
        if decode is not None:
            arguments.function_of("decode", decode)
        declaration = arguments.dataset_declaration(
            urls=urls, batch_size=batch_size, columns=columns, filter=filter, format=format, **text
        )
        return self._data.evaluate(name, *decoding(declaration, decode), measure)

    def log(self, **metrics: SupportsFloat) -> None:
        """Report metrics of the current batch. ``status`` and the progress bar show their means, weighted by records.

        If there is an output directory, the metrics are also written to files in it; see ``curves.files``.
        """
        self._require_open()
        current = self._participation.current
        values = arguments.metrics_of(metrics)
        if current is not None:
            self._process.progress.metrics(values, current.record_count, current.batch.epoch)
        elif (of_group := self._data.group_batch) is not None:
            self._process.progress.metrics(values, *of_group)
        else:
            self._process.progress.metrics(values, 1)

    def wait_for_end(self) -> None:
        """Wait until the trainers have completed every task of every epoch. A loop's end implies this.

        After this call, ``model.pull`` returns the final values. If a pserver then dies and loses batches,
        ``model.pull`` raises BegunAnewError, and restarted trainers repeat these batches.
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
        """End the whole job before all epochs are done, for example for early stopping.

        The master assigns no further tasks, and the remaining data is not used. Each trainer's loop ends when the
        trainer has finished the tasks that it has begun (at most two); a trainer may also leave its loop immediately.
        Any trainer may call this method, even repeatedly. Ending early is not an error, and ``--resume`` can continue
        from the last checkpoint.

        The ranks of a group end their loops after the same round, which the master chooses. Their last position is the
        one after this round.

        Work that was lost with a pserver is repeated before the job ends, so at least one trainer should stay in its
        loop. If no trainer requests this work for 30 s, the job fails and names the tasks.

        Args:
            reason: Reason that ``flightedl status``, and ``flightedl run`` at its end, show with this trainer's name.
                At most 256 characters are kept.

        Raises:
            UsageError: the session is over, or the reason is empty.
        """
        self._require_open()
        chosen = arguments.name_of("the reason", reason)
        self._process.send_to_master("stop", StopRequest, reason=chosen[:256], name=self._settings.process_name)
        self._data.stopped()

    def save_model(
        self,
        url: str | Path,
        *,
        format: str = "",  # noqa: A002 - common name
        server: bool = False,
        once: Once | None = None,
    ) -> Saved:
        """Write the model to one file. All trainers must call this; one of them writes the file.

        The n-th call for a URL within an epoch is the same request in all trainers. A later request for the same URL
        replaces the file. A trainer that starts during an epoch continues to count from the requests made so far.

        Args:
            url: Path or URL of the file, ending in .safetensors, .npz or .arrow.
            format: The file's format, if its name has another extension.
            server: True if the master writes the values of a new checkpoint, instead of this trainer writing its copy.
            once: Result of ``Job.once``: write only if this trainer still holds that name. Not needed to ensure that
                only one trainer writes the file.

        Returns:
            "written" in the trainer that wrote the file, or had the master write it. In the others, "another wrote it",
            or "not needed" if a newer request had already been made. Only the first of these strings is true.

        Raises:
            UsageError: there is no model, the session is over, the format is unknown, or (with ``server``) the job has
                no checkpoints.
            UnavailableError: the file could not be written.
            FencedError: another trainer now holds the name ``once``. The file did not change.
        """
        self._require_open()
        target = arguments.url_of("url", url)
        if not isinstance(once, Once | None):
            raise UsageError(f"once is {once!r}: pass the result of job.once")
        return self._model.save(target, format, server=server, once=once)

    def once(self, name: str) -> Once:
        """Claim a name for this trainer alone, for work that is done once, such as writing the final report.

        ::

            if won := job.once("report"):
                won.publish(job.output_dir / "report.json", report)

        A trainer loses its name if it dies or raises an exception before its session ends, or if it is frozen or
        disconnected for longer than its lease. Another trainer may then claim the name and repeat the work. If a dead
        trainer still holds the name, the trainer that replaces it waits until the lease has ended.

        A frozen trainer is not notified when it continues: ``won.require()`` raises FencedError, and ``won.publish``
        and ``save_model(once=won)`` do not replace the new holder's files. Other side effects are unprotected and
        should be idempotent.
        """
        self._require_open()
        return self._once.claim(arguments.name_of("the name given to once", name))

    @property
    def trainer(self) -> str:
        return self._process.trainer

    @property
    def generation(self) -> int:
        return self._process.generation

    def _life(self) -> int:
        return self._process.servers.life

    def _require_open(self) -> None:
        GUARD.check()
        if self._closed:
            raise UsageError(self._closed)

    def _shares_model(self) -> bool:
        """True if other trainers may be training the same model as this script's trainer."""
        is_known = self._model.is_declared or self._data.explicit_done or self._once.is_used
        return is_known or self._data.is_of_group or has_process_group()

    def _registered_again(self) -> None:
        self._data.registered_again()

    # the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, FlightedlError) and not GUARD.is_forked:
            self._data.raised(error)
        self._end(_CLOSED, error)

    def _leave_at_exit(self) -> None:
        try:
            self._end("its script has ended", script_error(is_over=True))
        except Exception as error:  # noqa: BLE001 - shown, and seen in the exit code
            # Raising an exception here would not change the exit code, but the launcher must learn that this rank
            # failed.
            sys.stdout.flush()
            sys.stderr.write(f"flightedl: {error}\n")
            sys.stderr.flush()
            os._exit(exit_code_of(error))

    def close(self, why: str = _CLOSED) -> None:
        """Return unfinished tasks and end the lease. Does nothing if called again.

        The session does not end cleanly if an exception is being handled, for example in a ``finally`` block.

        Args:
            why: Reason, for the errors of later calls.

        Raises:
            FencedError: this process is a rank of a group, and the group's current start is over.
            Exception: the error that has ended a loop over the data.
        """
        error = script_error()
        self._end(why, None if error is self._handled_at_start else error)

    def _end(self, why: str, error: BaseException | None) -> None:
        if self._closed or GUARD.is_forked:
            return
        self._closed = f"this session is over: {why}; connect again to continue"
        atexit.unregister(self._leave_at_exit)
        may_keep = False
        try:
            self._data.leave_group(error)
            may_keep = is_clean(exit_code_of(error))
        finally:
            self._data.close()
            self._model.close(self._closed)
            if may_keep:
                self._once.keep()
            self._process.close(is_clean=may_keep)


def has_process_group() -> bool:
    """True if torch.distributed is initialized, or if a launcher has given this process a rank."""
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)
    names = os.environ.keys()  # noqa: TID251 - set by other launchers, such as torchrun
    return is_initialized() or not names.isdisjoint({"RANK", "WORLD_SIZE"})
