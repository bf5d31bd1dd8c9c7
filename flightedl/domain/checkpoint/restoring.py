"""The parts of a checkpoint that each pserver reads. The number of pservers may have changed since the checkpoint.

Blocks keep their boundaries for the lifetime of a job (``sharding.reassigned``). If the number of pservers changes,
blocks are reassigned as they are and never split. So each block in a checkpoint has a single state: its values, slots,
version, update count and applied set. A pserver reads only the blocks that it owns now, from one or more files.
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
    """The part of one file that a pserver has to read."""

    file: ShardFile
    #: Numbers of the blocks and buckets that are needed, in ascending order.
    blocks: tuple[int, ...]
    #: Numbers of all blocks and buckets in the file, in ascending order.
    of_file: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        return len(self.blocks) == len(self.of_file)

    def split(self, block_count: int) -> tuple[tuple[int, ...], range]:
        """Split numbers into (block numbers, range of buckets). Buckets have numbers from ``block_count`` upwards."""
        blocks = tuple(number for number in self.blocks if number < block_count)
        buckets = self.blocks[len(blocks) :]
        return blocks, range(buckets[0], buckets[-1] + 1) if buckets else range(0)


def saved_plan(manifest: Manifest, parameters: Sequence[ParameterSpec]) -> ShardPlan:
    """Return the plan of a checkpoint, with its stored placement or, if none is stored, a computed placement.

    Raises:
        UsageError: the parameters differ, or this version cuts them into other blocks.
    """
    tables, placement = _saved(manifest)
    plan = plan_for(parameters, manifest.pserver_count, manifest.cut_for, tables)
    if placement is not None:
        with contextlib.suppress(UsageError):
            plan = placed(plan, placement)
    if plan.hash != manifest.plan_hash:
        raise UsageError(
            f"checkpoint {manifest.number} has other parameters, or the flightedl that wrote it cuts them otherwise. "
            "Declare the parameters as they were, or use the version that wrote it"
        )
    return plan


def saved_tables(manifest: Manifest) -> list[TableSpec]:
    """Return the tables of a checkpoint. Raises CorruptError if their declaration is invalid."""
    return _saved(manifest)[0]


def _saved(manifest: Manifest) -> tuple[list[TableSpec], Placement | None]:
    declaration = manifest.stored_declaration
    try:
        model = None if declaration is None else decode(declaration, JobDeclaration).model
        return ([], None) if model is None else (tables_of(model.declaration), model.placement)
    except (MessageError, UsageError) as error:
        raise CorruptError(f"checkpoint {manifest.number} has an invalid declaration: {error}") from None


def recut(manifest: Manifest, saved: ShardPlan, plan: ShardPlan, index: int) -> tuple[FilePart, ...]:
    """Return the parts of the checkpoint's files that a pserver has to read.

    Args:
        manifest: Manifest of the checkpoint.
        saved: Plan of the checkpoint, see ``saved_plan``.
        plan: Current plan of the job, with the same blocks.
        index: Index of the pserver in ``plan``.

    Raises:
        UsageError: the two plans have different blocks.
    """
    if not saved.has_same_cut(plan):
        raise UsageError(
            f"checkpoint {manifest.number} has parameters cut for {manifest.cut_for} pservers, so "
            f"the job's plan must be plan_for(parameters, {plan.pserver_count}, {manifest.cut_for}, tables)"
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
        parts: Result of ``recut``.
        applied: File name -> applied sets of all blocks in that file.
    """
    return AppliedBatches.rebuilt({number: applied[part.file.name] for part in parts for number in part.blocks})
