"""A job with real pservers in this process, for tests of modules: sessions for ``fe.torch``, and trainers in step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from flightedl.client.arguments import declared_arrays
from flightedl.client.data.slices import Slices
from flightedl.client.model.parameters import Parameters
from flightedl.client.model.trees import tree_of
from flightedl.client.tables.table import Table
from flightedl.domain.consistency.modes import Mode, Sync
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.tables.spec import TableSpec
from flightedl.domain.trainer.batches import CurrentBatch
from flightedl.messages.status import TableCounts

from ..client.pserver_bench import Cluster, Trainer


class BenchJob:
    """One trainer's session. The first of several trainers to declare the model creates the pservers."""

    def __init__(self, bench: TorchBench, member: int) -> None:
        self._bench, self._member = bench, member
        self.trainer: Trainer | None = None

    def parameters(
        self,
        initial: Any,
        *,
        optimizer: Optimizer,
        mode: Mode | None = None,
        wire: str = "",
        error_feedback: bool = False,
        local_steps: int | None = None,
    ) -> Parameters:
        tree = tree_of(initial)
        named = initial if tree is None else tree.leaves
        cluster = self._bench.declare(named, optimizer, Sync() if mode is None else mode, wire)
        self.trainer = cluster.trainer(self._member, error_feedback=error_feedback, tree=tree)
        if local_steps:
            self.trainer.parameters.slices = Slices(local_steps)
        return self.trainer.parameters

    def table(self, name: str, dim: int, *, optimizer: Optimizer, **more: Any) -> Table:
        spec = TableSpec(name, dim, optimizer, **more)
        self._bench.tables[name] = spec

        def declared(_: str) -> tuple[int, Parameters]:
            assert self.trainer is not None
            return sorted(self._bench.tables).index(name), self.trainer.parameters

        return Table(spec, declared, lambda name: TableCounts(name=name))

    def begin(self, batch: int, records: int = 1) -> None:
        """Start a batch."""
        assert self.trainer is not None
        self.trainer.begin(batch, of=1000, records=records)

    def begin_again(self, current: CurrentBatch) -> None:
        """Start the same batch again."""
        assert self.trainer is not None
        self.trainer.begin(current.number, of=1000, records=current.record_count)

    def end(self) -> None:
        """End the batch, as a request of the next one does."""
        assert self.trainer is not None
        current, model = self.trainer.current, self.trainer.parameters
        assert current is not None
        model.batch_ends(current)
        model.close_batch()
        self.trainer.current = None


class TorchBench:
    """Pservers that are created when the model is declared."""

    def __init__(self, trainers: int = 1, pservers: int = 1) -> None:
        self._pservers, self._trainers = pservers, trainers
        self._lock = threading.Lock()
        self.cluster: Cluster | None = None
        self.tables: dict[str, TableSpec] = {}
        self.jobs = [BenchJob(self, member) for member in range(1, trainers + 1)]

    @property
    def job(self) -> BenchJob:
        """Session of the first trainer."""
        return self.jobs[0]

    def declare(self, initial: Mapping[str, Any], optimizer: Optimizer, mode: Mode, wire: str) -> Cluster:
        with self._lock:
            if self.cluster is None:
                arrays = declared_arrays(initial, {})
                optimizer.check_names(arrays)
                # Declarations are transmitted as JSON.
                self.cluster = Cluster(
                    {name: array.shape for name, array in arrays.items()},
                    Mode.from_json(mode.to_json()),
                    pservers=self._pservers,
                    members=self._trainers,
                    optimizer=Optimizer.from_json(optimizer.to_json()),
                    wire=wire,
                    tables=[self.tables[name] for name in sorted(self.tables)],
                    initial={name: array.copy() for name, array in arrays.items()},
                )
            return self.cluster

    def run(self, program: Callable[[BenchJob], Any]) -> list[Any]:
        """Run all trainers concurrently, each in its own thread."""
        results: list[Any] = [None] * self._trainers
        errors: list[BaseException] = []

        def of(number: int) -> None:
            try:
                results[number] = program(self.jobs[number])
            except BaseException as error:  # noqa: BLE001 - raised in the test
                errors.append(error)

        threads = [threading.Thread(target=of, args=(number,)) for number in range(self._trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        if errors:
            raise errors[0]
        return results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.cluster is not None:
            self.cluster.__exit__(*unused)
