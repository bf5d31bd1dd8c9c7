"""What a trainer has of the job's model: its declaration, its first values, its parameters, and files of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flightedl.adapters.storage import FsspecFiles, without_credentials
from flightedl.client.arguments import declared_arrays
from flightedl.client.connections import SLICE_S, persistently
from flightedl.client.model.election import elect_and_initialize
from flightedl.client.model.parameters import Parameters
from flightedl.client.model.saving import ModelSaves
from flightedl.client.model.trees import Tree, tree_of
from flightedl.client.once import Once
from flightedl.client.participation import Participation
from flightedl.client.process import TrainerProcess
from flightedl.client.tables.requests import DistinctIds, kernels
from flightedl.client.tables.table import Column, Table, asked_of
from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.model.optimizers import SGD, Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.domain.retries import is_transient
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.first_values import FollowedElection
from flightedl.domain.trainer.steps import Steps
from flightedl.errors import DeclarationError, FlightedlError, UnavailableError, UsageError
from flightedl.formats.model_files import format_of
from flightedl.kernels.half_precision import check_kind
from flightedl.messages.base import decode, encode
from flightedl.messages.checkpoints import SaveModelReply, SaveModelRequest
from flightedl.messages.declarations import DeclaredModel, ModelDeclaration, ParameterDeclaration
from flightedl.messages.parameters import TableTicket
from flightedl.messages.status import PserverStatusReply, TableCounts
from flightedl.recording.recorded import recorded

Array = npt.NDArray[np.generic]

#: Limit for reading all rows of a table from one pserver.
_EXPORT_S = 3600.0


class JobModel:
    """The model of one session.

    Args:
        process: The trainer's.
        participation: Knows which batch it works on.
    """

    def __init__(self, process: TrainerProcess, participation: Participation) -> None:
        self._process = process
        self._participation = participation
        self._parameters: Parameters | None = None
        #: By name, as the session declared them.
        self._tables: dict[str, Table] = {}
        #: The same in the order of their numbers, once they are declared to the master.
        self._numbers: dict[str, int] = {}
        self._saves = ModelSaves(process.coordinator, process.keys, process.registration, process.waiting, self._life)

    def declare(
        self,
        initial: Any,
        *,
        optimizer: Optimizer | str | None,
        mode: Mode | str | None,
        wire: str,
        error_feedback: bool,
        dtypes: Mapping[str, str | type[np.generic]] | None,
    ) -> Parameters:
        """Declare the model, and have its values. Errors as of ``Job.parameters``."""
        if self._parameters is not None:
            raise UsageError(
                "this session already has its parameters: declare all of them in one call; for several modules and "
                "optimizers of PyTorch make one nn.ModuleDict and one fe.torch.Optimizer, see steps_per_batch="
            )
        tree = tree_of(initial)
        check_kind(wire)
        chosen_mode = Sync() if mode is None else Mode.chosen(mode)
        chosen_optimizer = SGD(lr=0.01) if optimizer is None else Optimizer.chosen(optimizer)
        if error_feedback and not wire:
            raise UsageError('error_feedback is about what wire="bfloat16" or "float16" rounds off: give a wire, too')
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
        return self._parameters

    def _declare(
        self, declaration: ModelDeclaration, specs: Sequence[ParameterSpec]
    ) -> tuple[DeclaredModel, ShardPlan]:
        """Declare the model to the master; return the answer, and who owns the blocks by it."""
        declared = self._process.ask_master("declare_model", encode(declaration), DeclaredModel)
        tables = [self._tables[name].spec for name in sorted(self._tables)]
        plan = plan_for(specs, declared.pservers, declared.cut_for, tables, declared.placement)
        if plan.hash != declared.plan_hash:
            raise DeclarationError(
                "this trainer computes another shard plan: run the same flightedl version everywhere"
            )
        return declared, plan

    @property
    def is_declared(self) -> bool:
        """Whether there is a model, or a table that will be one."""
        return self._parameters is not None or bool(self._tables)

    # tables

    def table(self, spec: TableSpec) -> Table:
        """Declare a table. Errors as of ``Job.table``."""
        if (known := self._tables.get(spec.name)) is not None:
            spec = replace(spec, first_rows=known.spec.first_rows)
            if known.spec != spec:
                raise DeclarationError(f"table {spec.name!r} was declared before: {difference(known.spec, spec)}")
            return known
        if self._parameters is not None:
            raise UsageError(f"declare table {spec.name!r} before job.parameters, which declares the whole model")
        kernels()  # so that no step waits for them
        table = self._tables[spec.name] = Table(spec, self._declared, self.table_counts, self)
        self._participation.before_batches = self.require_declared
        return table

    def begin_with(self, name: str, url: str) -> None:
        """Let a table begin with the rows of a file. Errors as of ``Table.load``."""
        table = self._tables[name]
        if table.spec.first_rows not in {"", url}:
            raise UsageError(
                f"table {name!r} begins with the rows of {without_credentials(table.spec.first_rows)} already"
            )
        if self._parameters is not None and not table.spec.first_rows:
            raise UsageError(f"load rows of table {name!r} before job.parameters, or its first pull: it is in use")
        # Few jobs begin with rows, and reading Parquet takes a while to import.
        from flightedl.formats.table_files import require_table_file

        require_table_file(FsspecFiles(), url, table.spec)
        table.spec = replace(table.spec, first_rows=url)

    def require_declared(self) -> Parameters:
        """The model, declared with nothing but tables if nobody has declared it yet."""
        if self._parameters is None:
            if not self._tables:
                raise UsageError("there is no model: declare it with job.parameters or job.table first")
            return self.declare({}, optimizer=None, mode=None, wire="", error_feedback=False, dtypes=None)
        return self._parameters

    def _declared(self, name: str) -> tuple[int, Parameters]:
        parameters = self.require_declared()
        return self._numbers[name], parameters

    def own_table(self, table: object) -> Table:
        """UsageError unless it is a table of this session."""
        if not isinstance(table, Table) or self._tables.get(table.name) is not table:
            raise UsageError(f"{table!r:.80} is no table of this job: give what job.table returned")
        return table

    def look_up(self, ids: Mapping[Table, Any]) -> dict[Table, npt.NDArray[np.float32]]:
        """Rows of several tables. Errors as of ``Job.lookup``."""
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
        """Steps ask for the rows of the next batch, too.

        Args:
            columns: Table -> the column of the batches that has its ids, or what makes them of a batch.
            peek: The next batch; None: it is not known.
        """
        wanted = {self.own_table(table): column for table, column in columns.items()}
        self.require_declared().rows.next_ids = lambda: self._ahead(wanted, peek())

    def _ahead(self, columns: Mapping[Table, Column], records: pa.RecordBatch | None) -> dict[int, DistinctIds] | None:
        """By table number, the ids that a batch is going to look up; None: they are not known."""
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
            # What is wrong with the next batch is told when it is there; the one at hand is pushed.
            return None

    def _status_of(self, index: int) -> PserverStatusReply:
        _, connection = self._process.servers.pserver(index)
        return decode(connection.action("status", b"", timeout_s=SLICE_S), PserverStatusReply)

    def table_counts(self, name: str) -> TableCounts:
        """Figures of a table over all pservers."""
        parameters = self.require_declared()
        found = TableCounts(name=name)
        for index in range(parameters.plan.pserver_count):
            status = persistently(self._process.waiting(), partial(self._status_of, index))
            for counts in status.tables:
                found = found.plus(counts) if counts.name == name else found
        return found

    def _elect(self, plan: ShardPlan, values: Mapping[str, Array]) -> None:
        """Return when the model has its first values; from then on only that model is worked for."""
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
        """The parameters, with the job's present values."""
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
            tree=tree,
            probe=process.probe,
            newest_plan=lambda: self._declare(declared.declaration, plan.parameters)[1],
        )
        self._participation.set_model(parameters, mode)
        parameters.refresh()
        return parameters

    def save(self, target: str, form: str, *, server: bool, once: Once | None) -> bool:
        """Write the model as one file, or see that another trainer does. Errors as of ``Job.save_model``."""
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
            # Few trainers write, and it knows all files of checkpoints.
            from flightedl.coordination.checkpoint_places import write_model

            def write_file() -> None:
                write_model(target, form, specs, zip(specs, parameters.values(), strict=True), require)

            persistently(self._process.waiting(), write_file)

        return self._saves.save(target, self._participation.epoch, write)

    def save_table(self, name: str, target: str, *, has_slots: bool) -> bool:
        """Have the rows of a table written as one file, by one of all trainers. Errors as of ``Table.export``."""
        self.require_declared()

        def write(require_request: Callable[[], None]) -> None:
            require_request()
            reply = self._save_on_master(SaveModelRequest(url=target, table=name, slots=has_slots, life=self._life()))
            if reply.state == "live":
                self._export(name, target, has_slots, require_request)

        return self._saves.save(target, self._participation.epoch, write)

    def _export(self, name: str, target: str, has_slots: bool, require: Callable[[], None]) -> None:
        """Write the rows of a table as the pservers have them now."""
        from flightedl.coordination.checkpoint_places import write_file
        from flightedl.formats.table_files import file_of, schema_of

        schema = schema_of(self._tables[name].spec, has_slots=has_slots)
        lost: list[FlightedlError] = []
        plan = self.require_declared().plan

        def batches() -> Iterator[pa.RecordBatch]:
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
                if error not in lost or not is_transient(error):
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
        """Nothing is pushed or pulled any more; ``why`` is told to whoever still asks."""
        if self._parameters is not None:
            self._parameters.close(why)


def difference(known: TableSpec, declared: TableSpec) -> str:
    """In which settings two declarations of a table differ, for people."""
    one, other = known.to_json(), declared.to_json()
    return "; ".join(
        f"{name} is {one[name]!r:.60}, not {other[name]!r:.60}" for name in one if one[name] != other[name]
    )
