"""Handle declarations of the dataset and the model: index the dataset, or plan the model, for the core."""

from __future__ import annotations

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.master.events import ModelPlanned
from flightedl.domain.model.declared import parameters_of, tables_of
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.sharding import placed, placement_of, plan_for
from flightedl.master.growing import Growing
from flightedl.master.indexing import DatasetIndexing
from flightedl.master.state import JobState
from flightedl.messages.declarations import DatasetDeclaration, DeclaredDataset, DeclaredModel, ModelDeclaration


class Declaring:
    """Handles declarations. A declaration is durable before it is answered. Thread-safe."""

    def __init__(self, state: JobState, growing: Growing, indexing: DatasetIndexing) -> None:
        self._state = state
        self._growing = growing
        self._indexing = indexing

    def dataset(self, declared: DatasetDeclaration) -> DeclaredDataset:
        """Declare the dataset. The first declaration is adopted; in a resumed job, it may change the order of tasks.

        Raises:
            DataError: a file is unusable.
            DeclarationError: the job has a different dataset.
            NotReadyError: the index is being built, or etcd cannot be written. Repeat the request.
            UsageError: the resumed job has already passed the new last epoch.
        """
        declared = self._indexing.admitted(declared)
        state, index = self._state, self._indexing.index
        reply = state.declare(declared, lambda: state.begin_dataset(index(declared)))
        assert isinstance(reply, DeclaredDataset), "an indexed dataset is declared"
        self._growing.begin()
        return reply

    def model(self, declared: ModelDeclaration) -> DeclaredModel:
        """Declare the model. The first declaration is adopted; in a resumed job, it may change settings.

        Raises:
            UsageError: a parameter, the optimizer or the mode is invalid.
            DeclarationError: the job has a different model.
            NotReadyError: etcd cannot be written. Repeat the request.
        """
        reply = self._state.declare(declared, lambda: self._state.apply(self._planned(declared)))
        assert isinstance(reply, DeclaredModel), "a planned model is declared"
        return reply

    def _planned(self, declared: ModelDeclaration) -> ModelPlanned:
        specs = parameters_of(declared)
        Optimizer.from_json(declared.optimizer).check_names([spec.name for spec in specs])
        Mode.from_json(declared.mode)
        plan = plan_for(specs, self._state.pserver_count, tables=tables_of(declared))
        placement = placement_of(plan)
        return ModelPlanned(declared, placed(plan, placement).hash, plan.block_count, placement)
