"""Declarations of the training data and of the model. In both cases, the first declaration is adopted.

Indexing a dataset or planning a model's blocks can take a long time. The core therefore answers the first declaration
with ``effects.Undeclared``. The driver then does the indexing or planning, reports the result (``DatasetIndexed``,
``ModelPlanned``), and repeats the declaration. If two trainers declare at the same time, the first result is adopted.

If a job is resumed from a checkpoint, it adopts the next declaration. This declaration may change the number of epochs,
the shuffling of epochs that have not begun, and the optimizer's settings.
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
    Placement,
)

#: Fields of the dataset's declaration that may change when a job is resumed.
_MAY_DIFFER = ("epochs", "shuffle", "seed")
_MAY_DIFFER_TEXT = "epochs, shuffle and seed"
#: Maximum number of excluded files whose names are stored.
_LEFT_OUT_LIMIT = 100


class Declarations:
    """The dataset and the model that trainers have declared."""

    def __init__(self, declaration: JobDeclaration, outbox: Outbox) -> None:
        self.known = declaration
        self._outbox = outbox
        #: Cached encoding of the declaration. Every comparison with the stored keys needs the encoding.
        self._encoded = (JobDeclaration(), b"")

    @property
    def plan_hash(self) -> str:
        return "" if self.known.model is None else self.known.model.plan_hash

    @property
    def has_model(self) -> bool:
        """True if trainers of this job have declared a model. Pservers then deduplicate batches."""
        return self.known.model is not None and not self.has_former_model

    @property
    def has_former_model(self) -> bool:
        """True if no trainer has declared the model since the job was resumed. Pservers wait for a declaration."""
        return self.known.model is not None and self.known.model.is_former

    def encode(self) -> bytes | None:
        if self.known.dataset is None and self.known.model is None:
            return None
        if self._encoded[0] is not self.known:
            self._encoded = (self.known, encode(self.known))
        return self._encoded[1]

    # the training data

    def dataset(self, declared: DatasetDeclaration) -> DeclaredDataset | None:
        """Return the declared dataset if it equals ``dataset``, or None if none has been declared.

        Raises:
            DeclarationError: they differ. The first declaration after resuming may differ in some settings.
        """
        known = self.known.dataset
        if known is not None:
            is_resumed = self.known.is_resumed
            # If an older version began the job, its declaration lacks ``shuffle_bytes``, and the job keeps its tasks.
            may_differ = (_MAY_DIFFER if is_resumed else ()) + (("shuffle_bytes",) if known.drawing is None else ())
            but = _MAY_DIFFER_TEXT if is_resumed else ""
            require_same("dataset", known.declaration, declared, may_differ=may_differ.__contains__, but=but)
        return known

    def adopt_dataset(self, reply: DeclaredDataset) -> None:
        self.known = replace(self.known, dataset=reply, is_resumed=False)

    def leave_out(self, files: Sequence[str]) -> None:
        """Record the files that are excluded from the dataset, each with a reason. The dataset is now complete."""
        # All reasons are stored with the declaration in a single etcd value, and etcd limits the size of values.
        reasons = list(files[:_LEFT_OUT_LIMIT])
        if more := len(files) - len(reasons):
            reasons.append(f"{more} more files")
        self.known = replace(self.known, left_out=reasons)
        text = "the dataset is complete without %d files: %s"
        self._outbox.note(Kind.DECLARED, "", text, len(files), reasons[0], is_warning=True)

    # the model

    def model(self, declared: ModelDeclaration) -> DeclaredModel | None:
        """Return the job's model if it equals ``declared``, or None if the job has no model yet.

        After a resume, the first declaration may change the optimizer's settings. Pservers adopt the model only after
        that declaration has been stored, so none of them has used the previous settings.

        Raises:
            UsageError: the optimizer is invalid.
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

    def place(self, placement: Placement) -> None:
        """Record the newest placement of the model's blocks."""
        model = self.known.model
        assert model is not None, "blocks are placed without a model"
        if model.placement != placement:
            self.known = replace(self.known, model=placed_model(model, placement))

    def adopt_former_model(self, declared: ModelDeclaration | None = None) -> DeclaredModel:
        """Adopt the model of the checkpoint from which the job resumed, with the settings of ``declared``, if any."""
        known = self.known.model
        assert known is not None, "a resumed job has a model"
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


def placed_model(model: DeclaredModel, placement: Placement) -> DeclaredModel:
    """Return the model with another placement of the same blocks."""
    cut = model.plan_hash.partition(".")[0]
    return replace(
        model,
        pservers=placement.pservers,
        cut_for=model.cut_for or model.pservers,
        placement=placement,
        plan_hash=f"{cut}.{placement.version}",
    )


def _is_setting(field: str, tables: Collection[str]) -> bool:
    """True if a field may change after a resume: an optimizer setting, or the initial values of a stored table."""
    path = field
    if field.startswith("tables."):
        names = [name for name in tables if field.startswith(f"tables.{name}.")]
        path = field.removeprefix(f"tables.{max(names, key=len, default='')}.")
        if path == "first_rows":
            return True
    return path.startswith("optimizer.") and path != "optimizer.kind"
