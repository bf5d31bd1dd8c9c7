"""Definition of a job: data, model and evaluations, as trainers declare them to the master and etcd stores them.

For each part of the job, the first declaration wins. A later one that differs is rejected, with the difference in the
error.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any

import msgspec

from flightedl.messages.base import Name, Natural, Reply, Request, Text


class DatasetDeclaration(Request, frozen=True, kw_only=True):
    """The arguments of ``job.dataset(...)``."""

    urls: list[Text]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    #: None for an endless dataset.
    epochs: Annotated[int, msgspec.Meta(ge=1)] | None = 1
    shuffle: bool = False
    seed: int = 0
    format: Text = ""
    columns: list[Text] | None = None
    #: Conditions [column, operator, value], all of which must hold.
    filter: list[tuple[str, str, Any]] | None = None
    records_per_task: Natural = 0
    on_corrupt: Text = "fail"
    #: Number of times that the loop yields each batch. Each time counts as a separate batch.
    steps_per_batch: Annotated[int, msgspec.Meta(ge=1)] = 1
    #: Number of slices in which the loop yields each batch, for as many steps of a trainer's own.
    local_steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    #: True if matching files may be added until their directory contains a file ``_END``; see ``formats.following``.
    follow: bool = False
    #: Weight of each of the ``urls``, which are the sources of a mixture; empty if the dataset is not a mixture.
    mixture: list[Annotated[float, msgspec.Meta(gt=0)]] = []
    #: End of a mixture's epoch; see ``domain.queue.mixture``.
    stop: Text = "first"
    #: Folder -> its new place, for files that are copies. Tells the master where to read; not part of the identity.
    data_moved: dict[Text, Text] = {}
    #: Column -> name of its type, for columns whose types are not inferred from the values or combined from the files.
    types: dict[Text, Text] = {}
    #: Names of the columns of CSV and TSV files without a header line; see ``formats.chunks.TextOptions``.
    names: list[Text] = []
    delimiter: Text = ""
    null_values: list[Text] = []
    #: Memory of the decoded chunks of a shuffled task. 0 to make each chunk a task, as older versions do.
    shuffle_bytes: Natural = 0


class Drawing(Reply, frozen=True, kw_only=True):
    """Arguments by which the tasks of shuffled data were drawn (see ``domain.queue.drawing``), also after a resume."""

    seed: int
    size_bytes: int
    version: int


class DeclaredDataset(Reply, frozen=True, kw_only=True):
    """The declared dataset, as indexed by the master. A followed dataset may have grown since it was indexed."""

    index_hash: str
    task_count: int
    record_count: int
    #: Schema of the batches: an Arrow IPC schema message, encoded in base64.
    schema: str
    declaration: DatasetDeclaration
    #: Hash of the times or ETags of files whose footers or headers do not show their entire content.
    version_hash: str = ""
    #: (number of batches, number of tasks that have so many batches). Numbers above 1,000 are rounded down to three
    #: digits. Empty if an older version indexed the dataset.
    task_batches: list[tuple[int, int]] = []
    #: None if tasks consist of consecutive chunks, or of the sources of a mixture.
    drawing: Drawing | None = None
    #: Number of chunks whose records a task mixes; 0 if they are not drawn.
    mixed_chunks: int = 0
    #: Sentences for users about what shuffling mixes.
    advice: list[str] = []


class ArrivalRecord(Reply, frozen=True, kw_only=True):
    """Files that were added to a followed dataset together, in this order. No task contains files of two arrivals."""

    #: [url, size in bytes, version]
    files: list[tuple[str, int, str]]


class EvaluationDeclaration(Request, frozen=True, kw_only=True):
    """Arguments of ``job.evaluate(...)``. Within a life of the model, a name identifies one evaluation."""

    name: Name
    dataset: DatasetDeclaration
    #: Election that gave the model its initial values; 0 if the trainer has declared no model.
    life: Natural = 0


class EvaluationRecord(Reply, frozen=True, kw_only=True):
    """An evaluation, as stored in etcd."""

    name: str
    declared: DeclaredDataset
    #: name -> [weighted sum, weight].
    sums: dict[str, tuple[float, float]]
    #: State of the evaluation's queue, in the queue's own encoding; empty after the evaluation's end.
    queue: str
    is_done: bool
    failed: int = 0


class EvaluationsRecord(Reply, frozen=True, kw_only=True):
    """The value of ``evaluations``."""

    evaluations: list[EvaluationRecord]
    #: Life of the model to which the evaluations belong; 0 if unknown.
    life: int = 0


class ParameterDeclaration(Request, frozen=True, kw_only=True):
    """One named array."""

    name: Name
    shape: list[Natural]
    dtype: Name


class ModelDeclaration(Request, frozen=True, kw_only=True):
    """Arguments of ``job.table(...)`` and ``job.parameters(...)``. Optimizers and mode are tagged objects."""

    parameters: list[ParameterDeclaration]
    optimizer: dict[str, Any]
    mode: dict[str, Any]
    #: "bfloat16" or "float16" to send float32 gradients and values (except initial values) with 16 bits per element.
    wire: Text = ""
    #: Embedding tables in ascending order of their names, each a tagged object of ``domain.tables``.
    tables: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=10_000)] = []


#: Runs of equal values: (value, length).
Runs = tuple[tuple[int, int], ...]


class Placement(Reply, frozen=True, kw_only=True):
    """Owners of all blocks and buckets, as stored by the master. The version changes whenever the owners change.

    Blocks and buckets are numbered together, the blocks first. Each field lists runs of consecutive numbers.
    """

    version: int
    #: Number of pservers, including those without blocks.
    pservers: int
    #: Runs of blocks: (index of the owner, number of blocks).
    blocks: Runs
    #: Runs of buckets: (index of the owner, number of buckets). Empty if there are no tables.
    buckets: Runs = ()
    #: Runs of blocks or buckets: (attempt that moved them to this owner, number of them). The attempt is 0 if they
    #: never moved. Empty if no block has moved.
    attempts: Runs = ()

    @property
    def owners(self) -> tuple[int, ...]:
        """Index of each block's and bucket's pserver."""
        return _unpacked(self.blocks + self.buckets)

    @property
    def holders(self) -> frozenset[int]:
        """Indexes of the pservers that have blocks or buckets."""
        return frozenset(owner for owner, _ in self.blocks + self.buckets)

    def attempt_of(self, block: int) -> int:
        """Return the attempt that moved a block or bucket to its owner; 0 if it never moved."""
        return _unpacked(self.attempts)[block] if self.attempts else 0

    def blocks_of(self, index: int) -> list[int]:
        """Return the numbers of a pserver's blocks and buckets, ascending."""
        return [block for block, owner in enumerate(self.owners) if owner == index]

    def moved(self, moves: Iterable[tuple[range, int]], attempt: int) -> Placement:
        """Return the next version, after this attempt has moved ranges of blocks to other pservers."""
        owners = list(self.owners)
        attempts = list(_unpacked(self.attempts)) if self.attempts else [0] * len(owners)
        for blocks, destination in moves:
            for block in blocks:
                owners[block], attempts[block] = destination, attempt
        count = len(_unpacked(self.blocks))
        return msgspec.structs.replace(
            self,
            version=self.version + 1,
            blocks=runs_of_equal(owners[:count]),
            buckets=runs_of_equal(owners[count:]),
            attempts=runs_of_equal(attempts),
        )

    def resized(self, pservers: int) -> Placement:
        """Return the next version, with more pservers, or without pservers that have no blocks."""
        return msgspec.structs.replace(self, version=self.version + 1, pservers=pservers)


def runs_of_equal(values: Iterable[int]) -> Runs:
    """Return (value, length) of each run of equal values."""
    return tuple((value, len(list(run))) for value, run in groupby(values))


@lru_cache(maxsize=16)
def _unpacked(runs: Runs) -> tuple[int, ...]:
    return tuple(value for value, count in runs for _ in range(count))


class DeclaredModel(Reply, frozen=True, kw_only=True):
    """The declared model, and the placement of its blocks on pservers."""

    declaration: ModelDeclaration
    pservers: int
    plan_hash: str
    #: Number of pservers for which the parameters were divided into blocks; 0 if it equals ``pservers``.
    cut_for: int = 0
    #: Owners of the blocks. None if an older version declared the model; the owners are then computed.
    placement: Placement | None = None
    #: The current mode if it was changed during the job; None for the declared mode.
    mode: dict[str, Any] | None = None
    #: True if the model comes from a checkpoint, and no trainer has declared it since the job was resumed. No trainer
    #: uses the model before then, so the declaration may change the optimizer's settings.
    is_former: bool = False

    @property
    def present_mode(self) -> dict[str, Any]:
        return self.declaration.mode if self.mode is None else self.mode


class JobDeclaration(Reply, frozen=True, kw_only=True):
    """Value of the key ``job``: everything that trainers have declared."""

    dataset: DeclaredDataset | None = None
    model: DeclaredModel | None = None
    #: True if no trainer has declared the dataset since the job was resumed from a checkpoint. The declaration may
    #: change the number of epochs, and, starting with the next epoch, the shuffling.
    is_resumed: bool = False
    #: Files that had been added by the time of a checkpoint. In etcd, arrivals have separate keys.
    arrivals: list[ArrivalRecord] = []
    #: For each file that was excluded from a complete followed dataset, a sentence with its name and the reason.
    left_out: list[str] = []


class ElectionRecord(Reply, frozen=True, kw_only=True):
    """The value of ``init_params``."""

    trainer: str
    done: bool = False
