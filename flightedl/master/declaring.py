"""What trainers declare: the first declaration wins, and a different one is refused with the difference."""

from __future__ import annotations

import logging

import msgspec

from flightedl.domain.consistency.modes import Mode
from flightedl.domain.model.optimizers import Optimizer
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for
from flightedl.master.declarations import require_same, require_same_slots
from flightedl.master.growing import Growing
from flightedl.master.indexing import DatasetIndexing
from flightedl.master.state import JobState
from flightedl.messages.declarations import (
    DatasetDeclaration,
    DeclaredDataset,
    DeclaredModel,
    ModelDeclaration,
)

_log = logging.getLogger(__name__)

#: What a job that goes on from a checkpoint may declare otherwise of its data.
_MAY_DIFFER = ("epochs", "shuffle", "seed")
_MAY_DIFFER_TEXT = "epochs, shuffle and seed"


class Declaring:
    """Takes declarations. Thread-safe.

    Args:
        state: What is declared becomes part of it.
        growing: Begun with a dataset that is followed.
        indexing: Of the training data.
    """

    def __init__(self, state: JobState, growing: Growing, indexing: DatasetIndexing) -> None:
        self._state = state
        self._growing = growing
        self._indexing = indexing

    def dataset(self, declared: DatasetDeclaration) -> DeclaredDataset:
        """First declaration wins.

        Raises:
            DataError: a file cannot be used.
            DeclarationError: the job has another dataset.
            NotReadyError: the index is being built; ask again.
        """
        state = self._state
        with state.changing() as core:
            known = core.declaration.dataset
            if known is not None and core.declaration.is_resumed:
                known = self._resumed(known, declared)
            revision = core.revision
        if known is not None:
            require_same("dataset", known.declaration, declared)
            state.wait_durable(revision)
            self._growing.begin()
            return known
        dataset = self._indexing.index(declared)
        with state.changing() as core:
            if core.declaration.dataset is None:
                state.begin_queue(dataset, None, None)
                core.declaration = msgspec.structs.replace(core.declaration, dataset=dataset.reply, is_resumed=False)
                core.touch()
            known = core.declaration.dataset
            revision = core.revision
        assert known is not None
        require_same("dataset", known.declaration, declared)
        state.wait_durable(revision)
        self._growing.begin()
        return known

    def _resumed(self, known: DeclaredDataset, declared: DatasetDeclaration) -> DeclaredDataset:
        """Locked: the first declaration of a job that goes on from a checkpoint says how it goes on.

        That is how many epochs there are to be, and how those are shuffled that have not begun.

        Raises:
            DeclarationError: something else differs.
            UsageError: it is in a later epoch already.
        """
        require_same("dataset", known.declaration, declared, may_differ=_MAY_DIFFER.__contains__, but=_MAY_DIFFER_TEXT)
        state = self._state
        core = state.core
        reply = msgspec.structs.replace(known, declaration=declared)
        if declared != known.declaration:
            state.redeclare_dataset(reply)
            self._log_changes(known.declaration, declared)
        core.declaration = msgspec.structs.replace(core.declaration, dataset=reply, is_resumed=False)
        core.touch()
        return reply

    def _log_changes(self, before: DatasetDeclaration, now: DatasetDeclaration) -> None:
        """Locked: for people."""
        work = self._state.core.work
        assert work is not None, "a declared dataset has a queue"
        if before.epochs != now.epochs:
            _log.info("epochs changed before=%s now=%s", before.epochs, now.epochs)
        if (before.shuffle, before.seed) != (now.shuffle, now.seed):
            _log.info(
                "order changed shuffle=%s seed=%d first_epoch=%d",
                now.shuffle,
                now.seed,
                work.queue.first_unbegun_epoch + 1,
            )

    def model(self, declared: ModelDeclaration) -> DeclaredModel:
        """First declaration wins; of a job that was resumed, the first one since, which may change settings.

        Raises:
            UsageError: a parameter, the optimizer or the mode is not valid.
            DeclarationError: the job has another model.
        """
        state = self._state
        with state.changing() as core:
            known = core.declaration.model
        if known is None:
            specs = [ParameterSpec(p.name, tuple(p.shape), p.dtype) for p in declared.parameters]
            Optimizer.from_json(declared.optimizer).check_names([spec.name for spec in specs])
            Mode.from_json(declared.mode)
            plan = plan_for(specs, state.pserver_count)
            reply = DeclaredModel(declaration=declared, pservers=state.pserver_count, plan_hash=plan.hash)
            with state.changing() as core:
                if core.declaration.model is None:
                    core.declaration = msgspec.structs.replace(core.declaration, model=reply)
                    core.begin_membership(reply, None)
                    core.touch()
                    _log.info("model declared parameters=%d blocks=%d", len(specs), plan.block_count)
        with state.changing() as core:
            known = core.declaration.model
            assert known is not None
            if known.is_former:
                known = self._model_again(known, declared)
            revision = core.revision
        require_same("model", known.declaration, declared)
        state.wait_durable(revision)
        return known

    def _model_again(self, known: DeclaredModel, declared: ModelDeclaration) -> DeclaredModel:
        """Locked: the first declaration of a job that goes on from a checkpoint says how its optimizer is set.

        Pservers take a model over only when this is in etcd, so none of them has worked by the former settings.

        Raises:
            UsageError: the optimizer is not valid.
            DeclarationError: something else differs.
        """
        may_differ = "the optimizer's settings"
        require_same("model", known.declaration, declared, may_differ=_is_setting, but=may_differ)
        optimizer = Optimizer.from_json(declared.optimizer)
        names = [parameter.name for parameter in declared.parameters]
        optimizer.check_names(names)
        require_same_slots(names, Optimizer.from_json(known.declaration.optimizer), optimizer)
        if declared != known.declaration:
            _log.info("optimizer changed before=%s now=%s", known.declaration.optimizer, declared.optimizer)
        return self._state.core.adopt_model(declared)


def _is_setting(field: str) -> bool:
    return field.startswith("optimizer.") and field != "optimizer.kind"
