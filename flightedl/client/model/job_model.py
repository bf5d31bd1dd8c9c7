"""The session's access to the job's model: its declaration, initial values, parameters, tables, and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.adapters.storage import FsspecFiles
from flightedl.client.arguments import declared_arrays
from flightedl.client.connections import SLICE_S, persistently
from flightedl.client.data.slices import Slices
from flightedl.client.model.election import elect_and_initialize
from flightedl.client.model.parameters import Parameters
from flightedl.client.model.saving import ModelSaves, Saved
from flightedl.client.model.trees import Tree, tree_of
from flightedl.client.once import Once
from flightedl.client.participation import Participation
from flightedl.client.process import TrainerProcess
from flightedl.client.tables.requests import DistinctIds, kernels
from flightedl.client.tables.table import Column, Table, asked_of
from flightedl.coordination.directory import Directory
from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.data_urls import without_credentials
from flightedl.domain.model.optimizers import SGD, Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, placed, plan_for
from flightedl.domain.retries import is_transient
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.first_values import FollowedElection
from flightedl.domain.trainer.steps import Steps
from flightedl.errors import DeclarationError, FlightedlError, StalePlacementError, UnavailableError, UsageError
from flightedl.formats.model_files import format_of
from flightedl.kernels.half_precision import check_kind
from flightedl.messages.base import decode, encode
from flightedl.messages.checkpoints import SaveModelReply, SaveModelRequest
from flightedl.messages.declarations import DeclaredModel, ModelDeclaration, ParameterDeclaration, Placement
from flightedl.messages.parameters import TableTicket
from flightedl.messages.status import PserverStatusReply, TableCounts
from flightedl.recording.recorded import recorded

Array = npt.NDArray[np.generic]

#: Timeout in seconds for reading all rows of a table from one pserver.
_EXPORT_S = 3600.0


class JobModel:
    """The model of one session.

    Args:
        process: The trainer's process.
        participation: Provides the current batch.
    """

    def __init__(self, process: TrainerProcess, participation: Participation) -> None:
        self._process = process
        self._participation = participation
        self._parameters: Parameters | None = None
        #: Tables of this session, by name.
        self._tables: dict[str, Table] = {}
        #: Table -> number of the table; filled when the tables are declared to the master.
        self._numbers: dict[str, int] = {}
        self._saves = ModelSaves(process.coordinator, process.keys, process.registration, process.waiting, self._life)

    def declare(
        self,
        initial: Any,
        *,
        optimizer: Optimizer | str | None = None,
        mode: Mode | None = None,
        wire: str = "",
        error_feedback: bool = False,
        dtypes: Mapping[str, str | type[np.generic]] | None = None,
        local_steps: int | None = None,
    ) -> Parameters:
        """Declare the model and wait until it has values. Raises the same errors as ``Job.parameters``."""
        if self._parameters is not None:
            raise UsageError(
                "this session already has its parameters: declare all of them in one call; with PyTorch, combine "
                "several modules in one nn.ModuleDict with one fe.torch.Optimizer, and see steps_per_batch="
            )
        tree = tree_of(initial)
        check_kind(wire)
        chosen_mode = mode or Sync()
        if local_steps and (self._tables or getattr(chosen_mode, "push_every", 1) > 1):
            what = "tables, whose rows have no local copy" if self._tables else "push_every: raise local_steps instead"
            raise UsageError(f"a model with local steps has no {what}")
        chosen_optimizer = SGD(lr=0.01) if optimizer is None else Optimizer.chosen(optimizer)
        if error_feedback and not wire:
            raise UsageError('error_feedback needs wire="bfloat16" or wire="float16", whose rounding it compensates')
        leaves = initial if tree is None else tree.leaves
        has_tables_only = bool(self._tables) and isinstance(leaves, Mapping) and not leaves
        values = {} if has_tables_only else declared_arrays(leaves, dtypes or {})
        specs = [ParameterSpec(name, value.shape, value.dtype.name) for name, value in values.items()]
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise UsageError(f"the initial value of parameter {name!r} has NaN or infinity")
        declaration = ModelDeclaration(
            parameters=[ParameterDeclaration(name=s.name, shape=list(s.shape), dtype=s.dtype) for s in specs],
            optimizer=chosen_optimizer.to_json(),
            mode=chosen_mode.to_json(),
            wire=wire,
            tables=[self._tables[name].spec.to_json() for name in sorted(self._tables)],
        )
        declared, plan = self._declare(declaration, specs)
        self._process.wait_for_pservers(declared.pservers)
        self._elect(plan, values)
        self._numbers = {table.name: number for number, table in enumerate(plan.tables)}
        self._parameters = self._connected(plan, declared, tree, error_feedback=error_feedback)
        if local_steps:
            self._parameters.slices = Slices(local_steps)
        return self._parameters

    def _declare(
        self, declaration: ModelDeclaration, specs: Sequence[ParameterSpec]
    ) -> tuple[DeclaredModel, ShardPlan]:
        declared = self._process.ask_master("declare_model", encode(declaration), DeclaredModel)
        tables = [self._tables[name].spec for name in sorted(self._tables)]
        plan = plan_for(specs, declared.pservers, declared.cut_for, tables, declared.placement)
        if plan.hash != declared.plan_hash:
            raise DeclarationError(
                "this trainer computes a different shard plan: run the same flightedl version everywhere"
            )
        return declared, plan

    @property
    def is_declared(self) -> bool:
        """True if the session has declared a model, or a table that will be part of one."""
        return self._parameters is not None or bool(self._tables)

    @property
    def slices(self) -> Slices | None:
        """The slices of each batch; None unless the model has local steps."""
        return None if self._parameters is None else self._parameters.slices

    # tables

    def table(self, spec: TableSpec) -> Table:
        """Declare an embedding table. Raises the same errors as ``Job.table``."""
        if (known := self._tables.get(spec.name)) is not None:
            spec = replace(spec, first_rows=known.spec.first_rows)
            if known.spec != spec:
                raise DeclarationError(f"table {spec.name!r} was declared differently: {difference(known.spec, spec)}")
            return known
        if self._parameters is not None:
            raise UsageError(f"declare table {spec.name!r} before job.parameters, which declares the whole model")
        kernels()  # Compile now, so that no step has to wait for the compiler.
        table = self._tables[spec.name] = Table(spec, self._declared, self.table_counts, self)
        self._participation.before_batches = self.require_declared
        return table

    def begin_with(self, name: str, url: str) -> None:
        """Use the rows in a file as a table's initial rows. Raises the same errors as ``Table.load``."""
        table = self._tables[name]
        if table.spec.first_rows not in {"", url}:
            raise UsageError(
                f"table {name!r} already begins with the rows of {without_credentials(table.spec.first_rows)}"
            )
        if self._parameters is not None and not table.spec.first_rows:
            raise UsageError(f"load the rows of table {name!r} before job.parameters and before its first pull")
        # Imported lazily: Parquet is slow to import, and few jobs load rows.
        from flightedl.formats.table_files import require_table_file

        require_table_file(FsspecFiles(), url, table.spec)
        table.spec = replace(table.spec, first_rows=url)

    def require_declared(self) -> Parameters:
        """Return the model. If none has been declared yet, declare one that consists only of tables."""
        if self._parameters is None:
            if not self._tables:
                raise UsageError("there is no model: declare it with job.parameters or job.table first")
            return self.declare({})
        return self._parameters

    def _declared(self, name: str) -> tuple[int, Parameters]:
        parameters = self.require_declared()
        return self._numbers[name], parameters

    def own_table(self, table: object) -> Table:
        """Return the table. Raises UsageError if another session declared it."""
        if not isinstance(table, Table) or self._tables.get(table.name) is not table:
            raise UsageError(f"{table!r:.80} is not a table of this job: pass the result of job.table")
        return table

    def look_up(self, ids: Mapping[Table, Any]) -> dict[Table, npt.NDArray[np.float32]]:
        for table in ids:
            self.own_table(table)
        asked = asked_of(ids)
        parameters = self.require_declared()
        numbers = {table: self._numbers[table.name] for table in asked}
        lookup = parameters.look_up({numbers[table]: wanted.distinct for table, wanted in asked.items()})
        plain = [table for table, wanted in asked.items() if wanted.is_plain and numbers[table] not in lookup.unknown]
        found = dict(zip(plain, lookup.spread([numbers[table] for table in plain]), strict=True))
        return {
            table: found[table] if table in found else table.rows_of(asked[table], lookup, numbers[table])
            for table in ids
        }

    def look_ahead(self, columns: Mapping[Table, Column], peek: Callable[[], pa.RecordBatch | None]) -> None:
        """Prefetch rows: let each step also look up the rows of the next batch.

        Args:
            columns: Table -> the column that contains its ids, or a function that computes the ids from a batch.
            peek: Returns the next batch, or None if it is unknown.
        """
        wanted = {self.own_table(table): column for table, column in columns.items()}
        self.require_declared().rows.next_ids = lambda: self._ahead(wanted, peek())

    def _ahead(self, columns: Mapping[Table, Column], records: pa.RecordBatch | None) -> dict[int, DistinctIds] | None:
        """Return the ids that a batch will look up, by table number, or None if they cannot be determined."""
        if records is None:
            return None
        try:
            wanted = {
                table: column(records) if callable(column) else records.column(column)
                for table, column in columns.items()
            }
            asked = asked_of(wanted, nulls="padding")
            return {self._numbers[table.name]: found.distinct for table, found in asked.items()}
        except (UsageError, KeyError):
            # An error in the next batch is reported when that batch is yielded, after the current one has been pushed.
            return None

    def _status_of(self, index: int) -> PserverStatusReply:
        _, connection = self._process.servers.pserver(index)
        return decode(connection.action("status", b"", timeout_s=SLICE_S), PserverStatusReply)

    def table_counts(self, name: str) -> TableCounts:
        parameters = self.require_declared()
        found = TableCounts(name=name)
        for index in range(parameters.plan.pserver_count):
            status = persistently(self._process.waiting(), partial(self._status_of, index))
            for counts in status.tables:
                found = found.plus(counts) if counts.name == name else found
        return found

    def _elect(self, plan: ShardPlan, values: Mapping[str, Array]) -> None:
        """Wait until the model has initial values. From then on, this trainer trains only that model."""
        process = self._process
        elected = elect_and_initialize(
            plan,
            values,
            registration=process.registration,
            coordinator=process.coordinator,
            keys=process.keys,
            directory=process.directory,
            servers=process.servers,
            waiting=process.waiting,
            recorder=process.recorder,
        )
        process.servers.follow(process.keys.init_params, recorded(process.recorder, {}, FollowedElection, elected))

    def _connected(
        self, plan: ShardPlan, declared: DeclaredModel, tree: Tree | None, *, error_feedback: bool
    ) -> Parameters:
        process = self._process
        mode = Mode.from_json(declared.present_mode)
        rule = Optimizer.from_json(declared.declaration.optimizer)
        parameters = Parameters(
            plan,
            mode,
            process.servers,
            self._participation,
            process.waiting,
            process.clock,
            rule.clip_norm,
            declared.declaration.wire,
            error_feedback,
            lambda *given: recorded(process.recorder, {"trainer": process.trainer}, Steps, *given),
            unclipped=rule.unclipped(spec.name for spec in plan.parameters),
            assigned=rule.assigned(spec.name for spec in plan.parameters),
            tree=tree,
            probe=process.probe,
            newest_plan=self._newest_plan,
        )
        process.directory.subscribe(lambda: parameters.swap(self._newest_plan(parameters.plan, 0.0)))
        self._participation.set_model(parameters, mode)
        parameters.refresh()
        return parameters

    def _newest_plan(self, plan: ShardPlan, wait_s: float) -> ShardPlan:
        """Return the plan with the newest placement in etcd; wait up to ``wait_s`` seconds for a newer one."""
        key = self._process.keys.placement

        def newer(directory: Directory) -> ShardPlan | None:
            entry = directory.entry(key)
            if entry is None or not plan.placement:
                return None
            placement = decode(entry.value, Placement)
            return placed(plan, placement) if placement.version > plan.placement else None

        return self._process.directory.wait_until(newer, wait_s) or plan

    def save(self, target: str, form: str, *, server: bool, once: Once | None) -> Saved:
        """Write the model to one file, unless another trainer does. Raises the same errors as ``Job.save_model``."""
        parameters = self._parameters
        if parameters is None:
            raise UsageError("there is no model to save: declare it with job.parameters first")
        format_of(target, form)

        def write(require_request: Callable[[], None]) -> None:
            def require() -> None:
                if once is not None:
                    once.require()
                require_request()

            if server:
                require()
                self._save_on_master(SaveModelRequest(url=target, format=form, life=self._life()))
                return
            parameters.pull()
            specs = [ParameterSpec(key, value.shape, value.dtype.name) for key, value in parameters.items()]
            # Imported lazily: this module imports all checkpoint formats, and few trainers write files.
            from flightedl.coordination.checkpoint_places import write_model

            def write_file() -> None:
                write_model(target, form, specs, zip(specs, parameters.values(), strict=True), require)

            persistently(self._process.waiting(), write_file)

        return self._saves.save(target, self._participation.epoch, write)

    def save_table(self, name: str, target: str, *, has_slots: bool) -> Saved:
        """Write a table's rows to one file, on one of the trainers. Raises the same errors as ``Table.export``."""
        self.require_declared()

        def write(require_request: Callable[[], None]) -> None:
            require_request()
            reply = self._save_on_master(SaveModelRequest(url=target, table=name, slots=has_slots, life=self._life()))
            if reply.state == "live":
                self._export(name, target, has_slots, require_request)

        return self._saves.save(target, self._participation.epoch, write)

    def _export(self, name: str, target: str, has_slots: bool, require: Callable[[], None]) -> None:
        from flightedl.coordination.checkpoint_places import write_file
        from flightedl.formats.table_files import file_of, schema_of

        schema = schema_of(self._tables[name].spec, has_slots=has_slots)
        lost: list[FlightedlError] = []

        def batches() -> Iterator[pa.RecordBatch]:
            # If buckets move before all pservers have answered, one of them rejects the plan, and all rows are read
            # again. Otherwise rows could be missing, or be read from two pservers.
            plan = self._newest_plan(self.require_declared().plan, 0.0)
            for index in range(plan.pserver_count):
                try:
                    yield from self._rows_of(index, plan.hash, name, schema, has_slots=has_slots)
                except FlightedlError as error:
                    lost.append(error)
                    raise

        waiting = self._process.waiting()
        while True:
            try:
                write_file(target, file_of(schema, batches()), require)
                break
            except FlightedlError as error:
                if error not in lost or not (is_transient(error) or isinstance(error, StalePlacementError)):
                    raise
                waiting.because(error)
            waiting.pause()
        waiting.over()

    def _rows_of(
        self, index: int, plan_hash: str, name: str, schema: pa.Schema, *, has_slots: bool
    ) -> Iterator[pa.RecordBatch]:
        generation, connection = self._process.servers.pserver(index)
        if self._participation.current is None:
            self._participation.require_final(index, generation)
        ticket = TableTicket(plan_hash=plan_hash, table=self._numbers[name], slots=has_slots)
        with connection.get(encode(ticket), timeout_s=_EXPORT_S, schema=schema) as stream:
            yield from (batch for batch, _ in stream if batch is not None)

    def _save_on_master(self, request: SaveModelRequest) -> SaveModelReply:
        waiting = self._process.waiting()
        while True:
            reply = self._process.ask_master("save_model", encode(request), SaveModelReply)
            if reply.state in {"written", "live"}:
                waiting.over()
                return reply
            if reply.state == "failed":
                waiting.over()
                raise UnavailableError(f"the {'table' if request.table else 'model'} was not saved: {reply.error}")
            waiting.patiently(f"the master to write the {'table' if request.table else 'model'}")
            waiting.pause()

    def _life(self) -> int:
        return self._process.servers.life

    def close(self, why: str) -> None:
        if self._parameters is not None:
            self._parameters.close(why)


def difference(known: TableSpec, declared: TableSpec) -> str:
    """Return text that names the settings in which two declarations of a table differ."""
    one, other = known.to_json(), declared.to_json()
    return "; ".join(
        f"{name} is {one[name]!r:.60}, not {other[name]!r:.60}" for name in one if one[name] != other[name]
    )
