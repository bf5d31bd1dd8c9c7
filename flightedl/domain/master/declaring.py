"""Declarations of the training data and the model. The first declaration of each wins.

What follows from a declaration may take long to find out: which tasks a dataset has, how a model lies on the pservers.
So a declaration of something that the job does not have is answered ``effects.Undeclared``; whoever drives the core
finds that out, says so (``DatasetIndexed``, ``ModelPlanned``), and asks again. When two do that at once, the first one
counts.

A job that goes on from a checkpoint takes the first declaration since for its own, also where it says otherwise how the
job goes on: how many epochs there are, how those are shuffled that have not begun, how the optimizer is set.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from msgspec.structs import replace

from flightedl.domain.master.differences import require_same, require_same_slots
from flightedl.domain.master.effects import Kind, Outbox
from flightedl.domain.model.declared import tables_of
from flightedl.domain.model.optimizers import Optimizer
from flightedl.messages.base import encode
from flightedl.messages.declarations import (
    DatasetDeclaration,
    DeclaredDataset,
    DeclaredModel,
    JobDeclaration,
    ModelDeclaration,
)

#: What a job that goes on from a checkpoint may declare otherwise of its data.
_MAY_DIFFER = ("epochs", "shuffle", "seed")
_MAY_DIFFER_TEXT = "epochs, shuffle and seed"
#: Maximum number of files that are named when a dataset is complete without them.
_LEFT_OUT_LIMIT = 100


class Declarations:
    """What trainers have declared of a job."""

    def __init__(self, declaration: JobDeclaration, outbox: Outbox) -> None:
        self.known = declaration
        self._outbox = outbox
        #: The stored form, made once: it goes into every comparison with what is stored.
        self._encoded = (JobDeclaration(), b"")

    @property
    def plan_hash(self) -> str:
        """The plan of the declared model; empty if none is declared."""
        return "" if self.known.model is None else self.known.model.plan_hash

    @property
    def has_model(self) -> bool:
        """True if trainers of this job have declared a model, whose pservers count each batch once."""
        return self.known.model is not None and not self.has_former_model

    @property
    def has_former_model(self) -> bool:
        """True if the model waits for a trainer that declares it again, and pservers wait with it."""
        return self.known.model is not None and self.known.model.is_former

    def encode(self) -> bytes | None:
        """Return the stored form; None if nothing is declared."""
        if self.known.dataset is None and self.known.model is None:
            return None
        if self._encoded[0] is not self.known:
            self._encoded = (self.known, encode(self.known))
        return self._encoded[1]

    # the training data

    def dataset(self, declared: DatasetDeclaration) -> DeclaredDataset | None:
        """Return the declared dataset if it is the same as this one; None if there is none.

        Raises:
            DeclarationError: it differs. The first declaration since the job was resumed may differ in some settings.
        """
        known = self.known.dataset
        if known is not None and self.known.is_resumed:
            may_differ = _MAY_DIFFER.__contains__
            require_same("dataset", known.declaration, declared, may_differ=may_differ, but=_MAY_DIFFER_TEXT)
        elif known is not None:
            require_same("dataset", known.declaration, declared)
        return known

    def adopt_dataset(self, reply: DeclaredDataset) -> None:
        self.known = replace(self.known, dataset=reply, is_resumed=False)

    def leave_out(self, files: Sequence[str]) -> None:
        """Take note why each of these files is not part of the dataset, which is complete."""
        # The sentences share one value in etcd with everything that is declared.
        told = list(files[:_LEFT_OUT_LIMIT])
        if more := len(files) - len(told):
            told.append(f"{more} more files")
        self.known = replace(self.known, left_out=told)
        text = "the dataset is complete without %d files: %s"
        self._outbox.note(Kind.DECLARED, "", text, len(files), told[0], is_warning=True)

    # the model

    def model(self, declared: ModelDeclaration) -> DeclaredModel | None:
        """Return the declared model if it is the same as this one; None if there is none.

        The first declaration since the job was resumed says how the optimizer is set. Pservers take a model over only
        when this is in etcd, so none of them has worked by the former settings.

        Raises:
            UsageError: the optimizer is not valid.
            DeclarationError: something else differs.
        """
        known = self.known.model
        if known is not None and known.is_former:
            self._require_same_but_settings(known.declaration, declared)
        elif known is not None:
            require_same("model", known.declaration, declared)
        return known

    def _require_same_but_settings(self, known: ModelDeclaration, declared: ModelDeclaration) -> None:
        is_setting = partial(_is_setting, tables=[table.name for table in tables_of(known)])
        require_same("model", known, declared, may_differ=is_setting, but="the optimizer's settings")
        optimizer = Optimizer.from_json(declared.optimizer)
        names = [parameter.name for parameter in declared.parameters]
        optimizer.check_names(names)
        require_same_slots(names, Optimizer.from_json(known.optimizer), optimizer)
        for before, now in zip(tables_of(known), tables_of(declared), strict=True):
            require_same_slots([now.name], before.optimizer, now.optimizer, "table")

    def adopt_model(self, model: DeclaredModel) -> None:
        self.known = replace(self.known, model=model)

    def adopt_former_model(self, declared: ModelDeclaration | None = None) -> DeclaredModel:
        """Make the model of a job that was resumed its own, also for pservers; ``declared``: with these settings."""
        known = self.known.model
        assert known is not None, "a former model is one"
        if declared is not None and declared != known.declaration:
            before = known.declaration
            self._note_change("optimizer", before.optimizer, declared.optimizer)
            for one, other in zip(before.tables, declared.tables, strict=True):
                self._note_change(f"optimizer of table {other['name']}", one["optimizer"], other["optimizer"])
        model = replace(known, declaration=declared or known.declaration, is_former=False)
        self.adopt_model(model)
        return model

    def _note_change(self, what: str, before: object, now: object) -> None:
        if before != now:
            self._outbox.note(Kind.DECLARED, "", "%s changed before=%s now=%s", what, before, now)


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
