"""What is declared: the training data, the model, evaluations. The first declaration of each wins.

What follows from a declaration may take long to find out: which tasks a dataset has, how a model lies on the pservers.
So a declaration of something that the job does not have is answered ``effects.Undeclared``; whoever drives the core
finds that out, says so (``DatasetIndexed``, ``ModelPlanned``, ``EvaluationIndexed``), and asks again. When two do that
at once, the first one counts.

A job that goes on from a checkpoint takes the first declaration since for its own, also where it says otherwise how the
job goes on: how many epochs there are, how those are shuffled that have not begun, how the optimizer is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import partial

from msgspec.structs import replace

from flightedl.domain.master import effects as out
from flightedl.domain.master import events
from flightedl.domain.master.differences import require_same, require_same_slots
from flightedl.domain.master.state import MasterState
from flightedl.domain.model.declared import tables_of
from flightedl.domain.model.optimizers import Optimizer
from flightedl.messages.declarations import (
    DatasetDeclaration,
    DeclaredDataset,
    DeclaredModel,
    EvaluationDeclaration,
    ModelDeclaration,
)

#: What a job that goes on from a checkpoint may declare otherwise of its data.
_MAY_DIFFER = ("epochs", "shuffle", "seed")
_MAY_DIFFER_TEXT = "epochs, shuffle and seed"
#: Maximum number of files that are named when a dataset is complete without them.
_LEFT_OUT_LIMIT = 100


class Declaring:
    """Takes declarations."""

    def __init__(self, state: MasterState) -> None:
        self._state = state

    # the training data

    def dataset(self, declared: DatasetDeclaration) -> DeclaredDataset | None:
        state = self._state
        known = state.declaration.dataset
        if known is not None and state.declaration.is_resumed:
            known = self._dataset_again(known, declared)
        if known is not None:
            require_same("dataset", known.declaration, declared)
        return known

    def _dataset_again(self, known: DeclaredDataset, declared: DatasetDeclaration) -> DeclaredDataset:
        """The first declaration since the job was resumed.

        Raises:
            DeclarationError: something differs that may not.
            UsageError: the queue is in a later epoch than there are to be.
        """
        require_same("dataset", known.declaration, declared, may_differ=_MAY_DIFFER.__contains__, but=_MAY_DIFFER_TEXT)
        state = self._state
        if declared != known.declaration:
            self._redeclare(known.declaration, declared)
        reply = replace(known, declaration=declared)
        state.declaration = replace(state.declaration, dataset=reply, is_resumed=False)
        state.touch()
        return reply

    def _redeclare(self, before: DatasetDeclaration, now: DatasetDeclaration) -> None:
        state = self._state
        assert state.work is not None, "a declared dataset has a queue"
        queue = state.work.queue
        tasks = dataclasses.replace(queue.settings, epochs=now.epochs, seed=now.seed, shuffle=now.shuffle)
        state.begin_training(tasks, *queue.encode_parts(), may_reseed=True)
        if before.epochs != now.epochs:
            state.outbox.note(out.Kind.DECLARED, "", "epochs changed before=%s now=%s", before.epochs, now.epochs)
        if (before.shuffle, before.seed) != (now.shuffle, now.seed):
            first_epoch = state.work.queue.first_unbegun_epoch + 1
            text = "order changed shuffle=%s seed=%d first_epoch=%d"
            state.outbox.note(out.Kind.DECLARED, "", text, now.shuffle, now.seed, first_epoch)

    def dataset_indexed(self, event: events.DatasetIndexed) -> None:
        state = self._state
        if state.declaration.dataset is None:
            state.begin_training(event.tasks, None, None)
            state.declaration = replace(state.declaration, dataset=event.reply, is_resumed=False)
            state.touch()
            tasks, records = event.reply.task_count, event.reply.record_count
            state.outbox.note(out.Kind.DECLARED, "", "dataset declared tasks=%d records=%d", tasks, records)

    def files_joined(self, event: events.FilesJoined) -> None:
        assert self._state.work is not None, "a dataset grows after it was declared"
        self._state.work.queue.grow(event.task_count, event.batch_counts)
        self._state.touch()
        self._state.outbox.note(out.Kind.DECLARED, "", "files joined the dataset tasks=%d", event.task_count)

    def growth_ended(self, event: events.GrowthEnded) -> None:
        state = self._state
        assert state.work is not None, "a dataset that grows has a queue"
        if event.left_out:
            # The sentences share one value in etcd with everything that is declared.
            told = list(event.left_out[:_LEFT_OUT_LIMIT])
            if more := len(event.left_out) - len(told):
                told.append(f"{more} more files")
            state.declaration = replace(state.declaration, left_out=told)
            text = "the dataset is complete without %d files: %s"
            state.outbox.note(out.Kind.DECLARED, "", text, len(event.left_out), told[0], is_warning=True)
        state.outbox.news("", state.work.queue.end_growth())
        state.touch()

    # the model

    def model(self, declared: ModelDeclaration) -> DeclaredModel | None:
        known = self._state.declaration.model
        if known is None:
            return None
        if known.is_former:
            known = self._model_again(known, declared)
        require_same("model", known.declaration, declared)
        return known

    def _model_again(self, known: DeclaredModel, declared: ModelDeclaration) -> DeclaredModel:
        """The first declaration since the job was resumed says how the optimizer is set.

        Pservers take a model over only when this is in etcd, so none of them has worked by the former settings.

        Raises:
            UsageError: the optimizer is not valid.
            DeclarationError: something else differs.
        """
        may_differ = "the optimizer's settings"
        is_setting = partial(_is_setting, tables=[table.name for table in tables_of(known.declaration)])
        require_same("model", known.declaration, declared, may_differ=is_setting, but=may_differ)
        optimizer = Optimizer.from_json(declared.optimizer)
        names = [parameter.name for parameter in declared.parameters]
        optimizer.check_names(names)
        require_same_slots(names, Optimizer.from_json(known.declaration.optimizer), optimizer)
        for before, now in zip(tables_of(known.declaration), tables_of(declared), strict=True):
            require_same_slots([now.name], before.optimizer, now.optimizer, "table")
        if declared != known.declaration:
            self._note_change("optimizer", known.declaration.optimizer, declared.optimizer)
            for one, other in zip(known.declaration.tables, declared.tables, strict=True):
                self._note_change(f"optimizer of table {other['name']}", one["optimizer"], other["optimizer"])
        return self._state.adopt_model(declared)

    def _note_change(self, what: str, before: object, now: object) -> None:
        if before != now:
            self._state.outbox.note(out.Kind.DECLARED, "", "%s changed before=%s now=%s", what, before, now)

    def model_planned(self, event: events.ModelPlanned) -> None:
        state = self._state
        if state.declaration.model is not None:
            return
        count = state.settings.pserver_count
        reply = DeclaredModel(
            declaration=event.declared, pservers=count, plan_hash=event.plan_hash, placement=event.placement
        )
        state.declaration = replace(state.declaration, model=reply)
        state.begin_membership(reply, None)
        state.touch()
        counts = (len(event.declared.parameters), event.block_count, len(event.declared.tables))
        state.outbox.note(out.Kind.DECLARED, "", "model declared parameters=%d blocks=%d tables=%d", *counts)

    # evaluations

    def evaluation(self, declared: EvaluationDeclaration) -> DeclaredDataset | None:
        if self._state.evaluations.enter(declared.life):
            self._state.touch()
        found = self._state.evaluations.known(declared.name)
        if found is None:
            return None
        require_same(f"dataset of the evaluation {declared.name!r}", found.declared.declaration, declared.dataset)
        return found.declared

    def evaluation_indexed(self, event: events.EvaluationIndexed) -> None:
        """Begin it, or go on with it; nothing when it runs."""
        state = self._state
        state.evaluations.begin(event.name, event.reply, event.tasks, state.trainers, state.now)
        state.touch()


def _is_setting(field: str, tables: Collection[str]) -> bool:
    """Whether it is a setting of an optimizer: of the parameters, or of a table with one of these names.

    What a table begins with may differ, too: its rows are in the checkpoint.
    """
    path = field
    if field.startswith("tables."):
        names = [name for name in tables if field.startswith(f"tables.{name}.")]
        path = field.removeprefix(f"tables.{max(names, key=len, default='')}.")
        if path == "first_rows":
            return True
    return path.startswith("optimizer.") and path != "optimizer.kind"
