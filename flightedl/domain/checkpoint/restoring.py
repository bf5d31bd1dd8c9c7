"""What each pserver reads from a checkpoint, also when there are more or fewer of them than when it was written.

Blocks keep their bounds for the life of a job (``sharding.reassigned``): on another number of pservers they are dealt
out anew, whole. So every block brings its own values, slots, version, update count and applied set, and nothing has to
be said about a block made of pieces that are at different versions. A pserver reads the blocks it now owns, from one or
more of the files, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flightedl.domain.checkpoint.manifest import Manifest, ShardFile
from flightedl.domain.exactly_once.applied import AppliedBatches
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import ShardPlan, plan_for
from flightedl.errors import UsageError


@dataclass(frozen=True, slots=True)
class FilePart:
    """What is needed of one file."""

    file: ShardFile
    #: Block numbers, rising.
    blocks: tuple[int, ...]
    #: Where each of them is among the file's blocks: its position in the file's applied sets.
    positions: tuple[int, ...]
    #: Whether these are all blocks of the file.
    is_whole: bool


def saved_plan(manifest: Manifest, parameters: Sequence[ParameterSpec]) -> ShardPlan:
    """The plan by which a checkpoint was written.

    Raises:
        UsageError: the parameters are others, or this version cuts them otherwise.
    """
    plan = plan_for(parameters, manifest.pserver_count, manifest.cut_for)
    if plan.hash != manifest.plan_hash:
        raise UsageError(
            f"checkpoint {manifest.number} is of other parameters, or of a flightedl that cuts them into other blocks: "
            "declare the parameters as they were, or use the version that wrote it"
        )
    return plan


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
    same = (
        saved.parameters == plan.parameters
        and saved.block_count == plan.block_count
        and (saved.block_starts == plan.block_starts).all()
        and (saved.block_parameters == plan.block_parameters).all()
    )
    if not same:
        raise UsageError(
            f"checkpoint {manifest.number} has its parameters cut for {manifest.cut_for} pservers: "
            f"the job's plan has to be plan_for(parameters, {plan.pserver_count}, {manifest.cut_for})"
        )
    wanted = set(plan.blocks_of(index).numbers.tolist())
    parts = []
    for file in manifest.shards:
        there = saved.blocks_of(file.index).numbers.tolist()
        found = [(number, position) for position, number in enumerate(there) if number in wanted]
        if found:
            numbers, positions = zip(*found, strict=True)
            parts.append(FilePart(file, numbers, positions, len(found) == len(there)))
    return tuple(parts)


def applied_of(parts: Sequence[FilePart], applied: Mapping[str, AppliedBatches]) -> AppliedBatches:
    """The applied sets of a pserver's blocks, by position among its blocks as rising numbers.

    Args:
        parts: What ``recut`` gave.
        applied: File name -> the sets of all blocks of that file.
    """
    sources = sorted(
        (number, part.file.name, position)
        for part in parts
        for number, position in zip(part.blocks, part.positions, strict=True)
    )
    return AppliedBatches.rebuilt([(applied[name], position) for _, name, position in sources])
