"""A trainer's session with its job: everything the user's script gets from ``fe.connect()``.

Wiring of one trainer process happens here and nowhere else. The session is a context manager: leaving it hands back
what is held and ends the lease, so that the others learn at once; leaving it by an exception also reports the batch at
which it happened.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.adapters.storage import FsspecFiles
from flightedl.client import arguments
from flightedl.client.connections import SLICE_S, Servers, persistently
from flightedl.client.data import evaluation
from flightedl.client.data.dataset import Dataset
from flightedl.client.data.evaluation import Measure
from flightedl.client.data.feed import Fetch, TaskFeed
from flightedl.client.data.readings import batches_of
from flightedl.client.data.skipped import telling
from flightedl.client.model.declared import declared_arrays
from flightedl.client.model.election import elect_and_initialize
from flightedl.client.model.parameters import Parameters
from flightedl.client.model.saving import ModelSaves
from flightedl.client.once import Once, OnceNames
from flightedl.client.participation import Participation
from flightedl.client.progress import ProgressReporter
from flightedl.client.raised import place_of
from flightedl.client.registration import Registration
from flightedl.client.waiting import Waits
from flightedl.config import TrainerSettings, settings
from flightedl.coordination.checkpoint_places import write_model
from flightedl.coordination.directory import Directory
from flightedl.coordination.keys import JobKeys
from flightedl.coordination.lives import JobCoordinator
from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.model.optimizers import SGD, Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for
from flightedl.domain.trainer.feed import Ask, AssignedTask
from flightedl.domain.trainer.retries import is_transient
from flightedl.errors import DeclarationError, FlightedlError, UnavailableError, UsageError
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.declared import schema_of, spec_of
from flightedl.formats.model_files import format_of
from flightedl.formats.reader import Decode
from flightedl.kernels.half_precision import check_kind
from flightedl.messages.base import decode, encode
from flightedl.messages.checkpoints import SaveModelReply, SaveModelRequest
from flightedl.messages.declarations import (
    DeclaredDataset,
    DeclaredModel,
    EvaluationDeclaration,
    ModelDeclaration,
    ParameterDeclaration,
)
from flightedl.messages.tasks import TasksReply
from flightedl.ports import Clock
from flightedl.process import tuning as process_tuning
from flightedl.recording.elections import followed_election
from flightedl.recording.endings import job_end
from flightedl.recording.loops import batch_loop
from flightedl.recording.membership import trainer_membership
from flightedl.recording.steps import trainer_steps
from flightedl.recording.trainer import trainer_feed
from flightedl.recording.writer import recording_process
from flightedl.rpc.authentication import Role
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import Caller
from flightedl.rpc.request_stream import RequestStream

Answer = TypeVar("Answer")

_CLOSE_S = 4.0
#: So long after the end of its lease at most, a master is replaced.
_TAKEOVER_S = 1.5


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
    process_tuning.apply()
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
        self._begin_again = begin_again
        self._cover_s = chosen.lease_ttl_s + _TAKEOVER_S
        self._clock: Clock = SystemClock()
        self._keys = JobKeys(chosen.job)
        self._recording = contextlib.ExitStack()
        #: None: nothing is recorded.
        self._recorder = self._recording.enter_context(
            recording_process(chosen.record, "trainer", chosen.job, self._clock)
        )
        self._coordinator = JobCoordinator(EtcdCoordinator(EtcdAccess.of(chosen), clock=self._clock), self._keys)
        try:
            self._registration = Registration(
                self._coordinator, self._clock, self._keys, chosen.lease_ttl_s, chosen.process_name
            )
        except BaseException:
            self._coordinator.close()
            self._recording.close()
            raise
        self._directory = Directory(self._coordinator, self._keys, self._clock).start()
        connector = Connector(Caller("trainer", self.trainer), Role.TRAINER, chosen.tls_dir)
        self._waits = Waits(self._clock, chosen.say_after_s, chosen.give_up_s, self._waits_for, job_over)
        self._servers = Servers(chosen.job, self._directory, connector, self._waits.asks)
        self._progress = ProgressReporter(
            self._send_progress, lambda: (self.trainer, self.generation), self._waits.look
        )
        self._dataset: Dataset | None = None
        self._evaluation: TaskFeed | None = None
        self._parameters: Parameters | None = None
        self._participation = Participation(
            self._registration,
            self._servers,
            self._waits.begin,
            self._began_anew,
            self._progress.batch,
            self._request_stream,
            trainer_membership(self._recorder, self.trainer),
            job_end(self._recorder),
        )
        self._files = FsspecFiles()
        self._once = OnceNames(self._coordinator, self._keys, self._registration, self._waits.begin)
        self._saves = ModelSaves(self._coordinator, self._keys, self._registration, self._waits.begin)
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
        decode: Decode | None = None,
        follow: bool = False,
    ) -> Dataset:
        """Declare the job's training data: the same in every trainer, whose share of it comes by iterating.

        With ``follow``, files that match later join as new tasks, for good and in the order in which they come. The
        master looks every few seconds (``FLIGHTEDL_FOLLOW_EVERY_S``) and takes a file when two looks find it the same,
        so one that is being written is left alone. Names that begin with ``_`` or ``.`` are left out. The last epoch
        ends when a file ``_END`` lies in the directory of each pattern, or a trainer calls ``Dataset.end``; an earlier
        one when all that is there is done. A file that cannot be used is left out and told by ``flightedl status``;
        one that is removed or changed after it was taken is told likewise, and whoever has to read it is refused.

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
            decode: For RecordIO: makes columns of a record's bytes.
            follow: More files are to come; see above.

        Raises:
            DataError: a file is missing, unreadable, or of another schema than the others.
            DeclarationError: the job already has a different dataset.
        """
        self._require_open()
        if self._dataset is not None:
            raise UsageError("this job already has its dataset: declare it once, before the training loop")
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
        )
        if decode is not None:
            arguments.function_of("decode", decode)
        spec = spec_of(declaration)
        declared = self._ask_master("declare_dataset", encode(declaration), DeclaredDataset)

        def read(task: AssignedTask) -> Iterator[pa.RecordBatch]:
            return self._read(task, spec, schema=schema_of(declared), decode=decode)

        self._dataset = Dataset(
            declared,
            self._open_feed,
            read,
            self._participation,
            self._waits.begin,
            _CLOSE_S,
            self._end_growth,
            self._begin_again,
            partial(batch_loop, self._recorder, self.trainer),
        )
        return self._dataset

    def parameters(
        self,
        initial: Mapping[str, npt.ArrayLike],
        *,
        optimizer: Optimizer | str | None = None,
        mode: Mode | str | None = None,
        wire: str = "",
        error_feedback: bool = False,
        dtypes: Mapping[str, str | type[np.generic]] | None = None,
    ) -> Parameters:
        """Declare the model: the same in every trainer. One trainer's values become the first ones.

        Args:
            initial: name -> float array of any shape; its values count only where this trainer is elected. Of float16
                and bfloat16 (``ml_dtypes.bfloat16``) arrays the pservers keep a float32 master copy, which they update
                and checkpoint; gradients and values travel and are seen with 16 bits.
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
        if self._parameters is not None:
            raise UsageError("this job already has its parameters: declare all of them in one call")
        check_kind(wire)
        chosen_mode = Sync() if mode is None else Mode.chosen(mode)
        chosen_optimizer = SGD(lr=0.01) if optimizer is None else Optimizer.chosen(optimizer)
        if error_feedback and not wire:
            raise UsageError('error_feedback is about what wire="bfloat16" or "float16" rounds off: give a wire, too')
        values = declared_arrays(initial, dtypes or {})
        specs = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in values.items()]
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise UsageError(f"the initial value of parameter {name!r} has NaN or infinity")
        declaration = ModelDeclaration(
            parameters=[ParameterDeclaration(name=s.name, shape=list(s.shape), dtype=s.dtype) for s in specs],
            optimizer=chosen_optimizer.to_json(),
            mode=chosen_mode.to_json(),
            wire=wire,
        )
        declared = self._ask_master("declare_model", encode(declaration), DeclaredModel)
        plan = plan_for(specs, declared.pservers, declared.cut_for)
        if plan.hash != declared.plan_hash:
            raise DeclarationError(
                "this trainer computes another shard plan: run the same flightedl version everywhere"
            )
        self._wait_for_pservers(declared.pservers)
        election = elect_and_initialize(
            plan,
            values,
            registration=self._registration,
            coordinator=self._coordinator,
            keys=self._keys,
            directory=self._directory,
            servers=self._servers,
            waiting=self._waits.begin,
            recorder=self._recorder,
        )
        self._servers.follow(self._keys.init_params, followed_election(self._recorder, election))
        present_mode = Mode.from_json(declared.present_mode)
        rule = Optimizer.from_json(declared.declaration.optimizer)
        self._parameters = Parameters(
            plan,
            present_mode,
            self._servers,
            self._participation,
            self._waits.begin,
            self._clock,
            rule.clip_norm,
            wire,
            error_feedback,
            partial(trainer_steps, self._recorder, self.trainer),
            unclipped=rule.unclipped(spec.name for spec in specs),
        )
        self._participation.take(self._parameters, present_mode)
        self._parameters.refresh()
        return self._parameters

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
        declaration = arguments.dataset_declaration(
            urls=urls, batch_size=batch_size, columns=columns, filter=filter, format=format
        )
        if decode is not None:
            arguments.function_of("decode", decode)
        spec = spec_of(declaration)
        chosen_name = arguments.name_of("the name of an evaluation", name)
        request = encode(EvaluationDeclaration(name=chosen_name, dataset=declaration))
        schema = schema_of(self._ask_master("declare_evaluation", request, DeclaredDataset))

        def read(task: AssignedTask) -> Iterator[pa.RecordBatch]:
            return self._read(task, spec, schema=schema, decode=decode)

        last = TasksReply(assignments=[], outcome="none_now")

        def fetch(ask: Ask) -> TasksReply:
            nonlocal last
            last = self._participation.fetch(requests, ask, name)
            return last

        requests = self._request_stream()
        self._evaluation = self._task_feed(fetch, requests, name)
        try:
            evaluation.run(self._evaluation, read, measure, self._waits.begin())
        finally:
            feed, self._evaluation = self._evaluation, None
            feed.close(_CLOSE_S)
        return evaluation.result(name, last)

    def log(self, **metrics: SupportsFloat) -> None:
        """Report metrics of the current batch; ``status`` and the progress bar show their mean over records."""
        current = self._participation.current
        self._progress.metrics(arguments.metrics_of(metrics), 1 if current is None else current.record_count)

    def wait_for_end(self) -> None:
        """Return when every task of every epoch is done, by whichever trainer; a finished loop means the same.

        What ``model.pull`` brings from then on is what was trained. If a pserver dies that late and lost something, it
        raises BegunAnewError: the lost part is done again, by trainers that are started again.
        """
        self._require_open()
        waiting, requests = self._waits.begin(), self._request_stream()
        for _ in waiting.steps():
            try:
                if self._participation.ask(requests).outcome == "epochs_done":
                    break
            except FlightedlError as error:
                if not is_transient(error):
                    raise
                waiting.because(error)
            else:
                waiting.patiently("the other trainers to finish their tasks")
        requests.close_idle()
        waiting.over()

    def stop(self) -> None:
        """End the whole job before all epochs are done: an early stop, of one that trains long enough, say.

        No more tasks are handed out. Every trainer's loop ends when it has finished the tasks that it has begun, two at
        most; who does not want to finish them leaves its loop. What is left of the data stays undone: that is not an
        error, and ``--resume`` can go on with it from the last checkpoint. Any trainer may call it, also twice.
        """
        persistently(self._waits.begin(), lambda: self._servers.master().action("stop", b"", timeout_s=SLICE_S))

    def _open_feed(self) -> TaskFeed:
        self._require_open()
        requests = self._request_stream()
        return self._task_feed(partial(self._participation.fetch, requests), requests)

    def _task_feed(self, fetch: Fetch, requests: RequestStream, evaluation: str = "") -> TaskFeed:
        feed = trainer_feed(self._recorder, self._cover_s, self.trainer, evaluation)
        return TaskFeed(fetch, requests.close_idle, self._clock, feed=feed)

    def _request_stream(self) -> RequestStream:
        return RequestStream("tasks", self._clock)

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
        parameters = self._parameters
        if parameters is None:
            raise UsageError("there is no model to save: declare it with job.parameters first")
        target = arguments.url_of("url", url)
        format_of(target, format)
        if not isinstance(once, Once | None):
            raise UsageError(f"once is {once!r}: give what job.once returned")

        def write(require_request: Callable[[], None]) -> None:
            def require() -> None:
                if once is not None:
                    once.require()
                require_request()

            if server:
                require()
                self._save_on_master(SaveModelRequest(url=target, format=format))
                return
            parameters.pull()
            specs = [ParameterSpec(key, value.shape, value.dtype.name) for key, value in parameters.items()]
            write_model(target, format, specs, zip(specs, parameters.values(), strict=True), require)

        return self._saves.save(target, self._participation.epoch, write)

    def _save_on_master(self, request: SaveModelRequest) -> None:
        waiting = self._waits.begin()
        for _ in waiting.steps():
            reply = self._ask_master("save_model", encode(request), SaveModelReply)
            if reply.state == "written":
                break
            if reply.state == "failed":
                waiting.over()
                raise UnavailableError(f"the model was not saved: {reply.error}")
            waiting.patiently("the master to write the model")
        waiting.over()

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
        return self._once.take(arguments.name_of("the name given to once", name))

    @property
    def trainer(self) -> str:
        """This trainer's id."""
        return self._registration.trainer

    @property
    def generation(self) -> int:
        """This trainer's generation."""
        return self._registration.generation

    # reading

    def _read(self, task: AssignedTask, spec: DatasetSpec, **more: Any) -> Iterator[pa.RecordBatch]:
        """The batches of a task; what is skipped as corrupt is told."""
        return telling(
            lambda counts: batches_of(self._files, task, spec, counts=counts, **more), self._progress.skipped
        )

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(self._closed)

    # talking to the master

    def _waits_for(self, reason: str) -> None:
        self._progress.waiting_for(reason)

    def _ask_master(self, verb: str, body: bytes, kind: type[Answer]) -> Answer:
        return persistently(
            self._waits.begin(),
            lambda: decode(self._servers.master().action(verb, body, timeout_s=SLICE_S), kind),  # type: ignore[type-var]
        )

    def _end_growth(self) -> None:
        persistently(self._waits.begin(), lambda: self._servers.master().action("end_growth", b"", timeout_s=SLICE_S))

    def _send_progress(self, body: bytes) -> None:
        self._servers.master().action("log", body, timeout_s=SLICE_S)

    def _began_anew(self) -> None:
        """This trainer is registered anew: what it held is somebody else's."""
        if self._dataset is not None:
            self._dataset.registered_again()
        if self._evaluation is not None:
            self._evaluation.registered_again()

    def _wait_for_pservers(self, count: int) -> None:
        waiting = self._waits.begin()
        for _ in waiting.steps():
            self._directory.require_followed()
            present = len([index for index in self._directory.pservers() if index < count])
            if present >= count:
                break
            waiting.because(f"{count - present} of {count} pservers are missing: start them with `flightedl pserver`")
        waiting.over()

    # the end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current = self._participation.current
        is_of_the_script = isinstance(error, Exception) and not isinstance(error, FlightedlError)
        if is_of_the_script and error is not None and current is not None and self._dataset is not None:
            last = "".join(traceback.format_exception_only(error)).strip()
            self._dataset.fail_current(current, last, place_of(error))
        self.close()

    def close(self, why: str = "it was closed, as at the end of its `with` block") -> None:
        """Hand back what is held and end the lease. Closing twice is fine."""
        if self._closed:
            return
        self._closed = f"this session is over: {why}; connect again to go on"
        if self._dataset is not None:
            self._dataset.close()
        self._progress.close()
        if self._parameters is not None:
            self._parameters.close(self._closed)
        self._once.keep()
        self._registration.close()
        self._servers.close()
        self._directory.close()
        self._coordinator.close()
        self._recording.close()
