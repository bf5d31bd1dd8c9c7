"""What each pserver reads from a checkpoint, also when there are more or fewer of them than when it was written.

Blocks keep their bounds for the life of a job (``sharding.reassigned``): on another number of pservers they are dealt
out anew, whole. So every block brings its own values, slots, version, update count and applied set, and nothing has to
be said about a block made of pieces that are at different versions. A pserver reads the blocks it now owns, from one or
more of the files, and no others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Manifest, ShardFile
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.declared import tables_of
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, placed, plan_for
from flightedl.domain.tables.spec import TableSpec
from flightedl.errors import CorruptError, MessageError, UsageError
from flightedl.messages.base import decode
from flightedl.messages.declarations import JobDeclaration, Placement


@dataclass(frozen=True, slots=True)
class FilePart:
    """What is needed of one file."""

    file: ShardFile
    #: Numbers of blocks and buckets, rising.
    blocks: tuple[int, ...]
    #: All that the file has, likewise.
    of_file: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """True if all blocks of the file are needed."""
        return len(self.blocks) == len(self.of_file)

    def split(self, block_count: int) -> tuple[tuple[int, ...], range]:
        """The blocks, and the range of buckets, of a plan with so many blocks."""
        blocks = tuple(number for number in self.blocks if number < block_count)
        buckets = self.blocks[len(blocks) :]
        return blocks, range(buckets[0], buckets[-1] + 1) if buckets else range(0)


def saved_plan(manifest: Manifest, parameters: Sequence[ParameterSpec]) -> ShardPlan:
    """Return the plan by which a checkpoint was written; without a stored placement, the computed one.

    Raises:
        UsageError: the parameters are others, or this version cuts them otherwise.
    """
    tables, placement = _saved(manifest)
    plan = plan_for(parameters, manifest.pserver_count, manifest.cut_for, tables)
    if placement is not None:
        with contextlib.suppress(UsageError):
            plan = placed(plan, placement)
    if plan.hash != manifest.plan_hash:
        raise UsageError(
            f"checkpoint {manifest.number} is of other parameters, or of a flightedl that cuts them into other blocks: "
            "declare the parameters as they were, or use the version that wrote it"
        )
    return plan


def saved_tables(manifest: Manifest) -> list[TableSpec]:
    """Return the tables that a checkpoint has rows of. CorruptError: its declaration is none."""
    return _saved(manifest)[0]


def _saved(manifest: Manifest) -> tuple[list[TableSpec], Placement | None]:
    """Return the tables of a checkpoint, and the placement of its blocks if one was stored."""
    declaration = manifest.stored_declaration
    try:
        model = None if declaration is None else decode(declaration, JobDeclaration).model
        return ([], None) if model is None else (tables_of(model.declaration), model.placement)
    except (MessageError, UsageError) as error:
        raise CorruptError(f"checkpoint {manifest.number} has a declaration that is none: {error}") from None


def recut(manifest: Manifest, saved: ShardPlan, plan: ShardPlan, index: int) -> tuple[FilePart, ...]:
    """Which blocks of which files a pserver needs.

    Args:
        manifest: Of the checkpoint.
        saved: Its plan, see ``saved_plan``.
        plan: The plan of the job as it is now: the same blocks.
        index: Of the pserver, in ``plan``.

    Raises:
        UsageError: the two plans have different blocks.
    """
    if not saved.has_same_cut(plan):
        raise UsageError(
            f"checkpoint {manifest.number} has its parameters cut for {manifest.cut_for} pservers: "
            f"the job's plan has to be plan_for(parameters, {plan.pserver_count}, {manifest.cut_for}, tables)"
        )
    wanted = set(plan.positions_of(index))
    parts = []
    for file in manifest.shards:
        there = saved.positions_of(file.index)
        if found := tuple(number for number in there if number in wanted):
            parts.append(FilePart(file, found, tuple(there)))
    return tuple(parts)


def applied_of(parts: Sequence[FilePart], applied: Mapping[str, AppliedBatches]) -> AppliedBatches:
    """Return the applied sets of a pserver's blocks.

    Args:
        parts: What ``recut`` gave.
        applied: File name -> the sets of all blocks of that file.
    """
    return AppliedBatches.rebuilt({number: applied[part.file.name] for part in parts for number in part.blocks})
