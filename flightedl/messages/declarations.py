"""What a job is: data, model and evaluations as trainers declare them to the master, and as etcd keeps them.

The first declaration of a part wins; a different one is refused with the difference.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from flightedl.messages.base import Name, Natural, Reply, Request, Text


class DatasetDeclaration(Request, frozen=True, kw_only=True):
    """What ``job.dataset(...)`` says. The first one wins; a different one is refused with the difference."""

    urls: list[Text]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    #: None: endless.
    epochs: Annotated[int, msgspec.Meta(ge=1)] | None = 1
    shuffle: bool = False
    seed: int = 0
    format: Text = ""
    columns: list[Text] | None = None
    #: [column, operator, value] conditions, all of which must hold.
    filter: list[tuple[str, str, Any]] | None = None
    records_per_task: Natural = 0
    on_corrupt: Text = "fail"
    #: So many times each batch is handed out, under an identity of its own each time.
    steps_per_batch: Annotated[int, msgspec.Meta(ge=1)] = 1
    #: The files that match are added to for as long as there is no ``_END`` beside them; see ``formats.following``.
    follow: bool = False


class DeclaredDataset(Reply, frozen=True, kw_only=True):
    """The declared dataset, as the master indexed it; one that is followed, as it was then."""

    index_hash: str
    task_count: int
    record_count: int
    #: Arrow IPC schema message, base64: what the batches look like.
    schema: str
    declaration: DatasetDeclaration


class ArrivalRecord(Reply, frozen=True, kw_only=True):
    """Files that joined a followed dataset together, in this order; its tasks are never of two arrivals."""

    #: [url, size in bytes, version]
    files: list[tuple[str, int, str]]


class EvaluationDeclaration(Request, frozen=True, kw_only=True):
    """What ``job.evaluate(...)`` says. The same name is the same evaluation, within a life of the model."""

    name: Name
    dataset: DatasetDeclaration
    #: Election of the model's first values; 0: the trainer has declared no model.
    life: Natural = 0


class EvaluationRecord(Reply, frozen=True, kw_only=True):
    """One evaluation as it lies in etcd."""

    name: str
    declared: DeclaredDataset
    #: name -> [weighted sum, weight].
    sums: dict[str, tuple[float, float]]
    #: The queue's own encoding; empty when it is done.
    queue: str
    is_done: bool
    failed: int = 0


class EvaluationsRecord(Reply, frozen=True, kw_only=True):
    """The value of ``evaluations``."""

    evaluations: list[EvaluationRecord]
    #: Life of the model that they belong to; 0: unknown.
    life: int = 0


class ParameterDeclaration(Request, frozen=True, kw_only=True):
    """One named array."""

    name: Name
    shape: list[Natural]
    dtype: Name


class ModelDeclaration(Request, frozen=True, kw_only=True):
    """What ``job.table(...)`` and ``job.parameters(...)`` say. Optimizers and mode are tagged objects (to_json)."""

    parameters: list[ParameterDeclaration]
    optimizer: dict[str, Any]
    mode: dict[str, Any]
    #: "bfloat16" or "float16": how float32 gradients and values travel, as 16 bits an element. First values never do.
    wire: Text = ""
    #: Embedding tables by rising name, each a tagged object of ``domain.tables``.
    tables: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=10_000)] = []


class DeclaredModel(Reply, frozen=True, kw_only=True):
    """The declared model and how it lies on the pservers."""

    declaration: ModelDeclaration
    pservers: int
    plan_hash: str
    #: For how many pservers the parameters were cut into blocks, where it was another number; 0: for ``pservers``.
    cut_for: int = 0
    #: The mode that was changed to while the job ran; None: the declared one.
    mode: dict[str, Any] | None = None
    #: As a checkpoint has it, and no trainer has declared it since: the optimizer may get other settings, and nobody
    #: works with it yet.
    is_former: bool = False

    @property
    def present_mode(self) -> dict[str, Any]:
        """The mode of now, as a tagged object."""
        return self.declaration.mode if self.mode is None else self.mode


class JobDeclaration(Reply, frozen=True, kw_only=True):
    """The value of the ``job`` key: all that the trainers declared, each part once."""

    dataset: DeclaredDataset | None = None
    model: DeclaredModel | None = None
    #: The job goes on from a checkpoint, and no trainer has declared its dataset since: it may have other epochs,
    #: and be shuffled otherwise from the next one on.
    is_resumed: bool = False
    #: In a checkpoint: all that had joined by then. In etcd, arrivals have keys of their own.
    arrivals: list[ArrivalRecord] = []
    #: Why files are no part of a dataset that was followed and is complete; each sentence names its file.
    left_out: list[str] = []


class ElectionRecord(Reply, frozen=True, kw_only=True):
    """The value of ``init_params``."""

    trainer: str
    done: bool = False
