"""What a trainer reads of a piece of work, and what of it is settled.

A *reading* is one pass over the batches of one :class:`~flightedl.client.feed.Piece`. The reader's thread passes on
items, each with the piece that it belongs to; the user's thread keeps a :class:`Reading` of the piece it works on.
A batch is *settled* when every block of every pserver has it, and a piece may be reported as finished only when all of
its batches were settled by the same reading: a reading that began in the midst, or left a batch out, does not count.

In which order records are read is said by who hands the piece out, for it depends on the epoch: this trainer's own
declaration may name a seed that does not count yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from flightedl.client.batches import CurrentBatch
from flightedl.client.feed import Piece
from flightedl.formats.dataset_spec import DatasetSpec
from flightedl.formats.reader import read_task
from flightedl.ports import Files


def batches_of(files: Files, piece: Piece, spec: DatasetSpec, **more: Any) -> Iterator[pa.RecordBatch]:
    """The batches of a piece in their order; ``more`` as of ``read_task``."""
    a = piece.assignment
    return read_task(files, piece.chunks, spec, a.seed, a.epoch, a.task, a.first_batch, a.end_batch, **more)


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """A batch that was read."""

    piece: Piece
    #: Within its task.
    number: int
    records: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class PieceEnd:
    """All batches of a piece were read."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """The batch of this number cannot be read, and none after it."""

    piece: Piece
    number: int
    error: Exception


Item = ReadBatch | PieceEnd | ReadFailure


@dataclass(eq=False, slots=True)
class Handed:
    """A batch that the user's code has or had."""

    item: ReadBatch
    current: CurrentBatch


@dataclass(slots=True)
class Reading:
    """One pass over a piece, as the user's code works on it."""

    piece: Piece
    #: Batches handed out of which it is not known yet that every block has them.
    handed: list[Handed] = field(default_factory=list)
    #: Numbers of the batches of which that is known.
    _settled: set[int] = field(default_factory=set)
    #: Pserver -> the oldest generation of it that has a batch of the piece.
    _generations: dict[int, int] = field(default_factory=dict)

    def settle(self, number: int, generations: Mapping[int, int]) -> None:
        """Every block has this batch; ``generations``: of the pservers that said so, by index."""
        self._settled.add(number)
        for index, generation in generations.items():
            self._generations[index] = min(generation, self._generations.get(index, generation))

    @property
    def is_settled(self) -> bool:
        """Whether every batch of the piece is settled."""
        assignment = self.piece.assignment
        return self._settled.issuperset(range(assignment.first_batch, assignment.end_batch))

    def generation_list(self) -> list[int]:
        """By index; 0: of a pserver that was sent nothing."""
        return [self._generations.get(index, 0) for index in range(max(self._generations, default=-1) + 1)]
