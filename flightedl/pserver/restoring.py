"""How a pserver gets its blocks back: from the newest checkpoint that can be loaded.

Every checkpoint of the model will do, because what it says is applied belongs to its values: an older one only means
more batches to be done again. So one that is torn, truncated or changed is skipped and reported, and the one before it
is tried. Blocks are read straight into their arrays, which nobody sees before all of them are verified.

A store that cannot be reached is asked again for ever: to begin without the values would be worse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flightedl.domain.applied import AppliedBatches
from flightedl.domain.checkpoints_manifest import (
    Skipped,
    candidates,
    examine,
    manifest_name,
    number_of,
    without_manifest,
)
from flightedl.domain.parameters import ParameterSpec
from flightedl.domain.sharding import ShardPlan
from flightedl.errors import CorruptError, NotFoundError, UsageError
from flightedl.formats.checkpoint_files import load_shard_blocks
from flightedl.formats.shard_files import StoredBlock
from flightedl.ports import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded. ``number`` None: no checkpoint can be loaded."""

    number: int | None
    applied: AppliedBatches | None
    skipped: tuple[Skipped, ...]


class Restorable(Protocol):
    """Blocks that nobody uses yet."""

    def restore_block(self, block: StoredBlock) -> None:
        """Overwrite a block's values, slots and version. CorruptError: it does not fit."""
        ...


def load_newest(
    storage: Storage,
    job: str,
    parameters: Sequence[ParameterSpec],
    plan: ShardPlan,
    index: int,
    shard: Restorable,
    loadable: Callable[[], range | None] = lambda: None,
) -> Restored:
    """Load the blocks of one pserver.

    Args:
        storage: Where the checkpoints lie.
        job: The job's name.
        parameters: As declared.
        plan: Where every block lies now.
        index: Of the pserver.
        shard: Takes the blocks.
        loadable: The numbers that etcd allows; None: all. Newer ones a deposed master may have left, and older ones may
            be of a model that was given first values anew.

    Raises:
        UnavailableError: the storage cannot be read at the moment; ask again.
    """
    sizes: dict[str, int] = {}
    while True:
        before, allowed = candidates(sizes), loadable()
        sizes = {file.name: file.size_bytes for file in storage.list("") if _is_wanted(file.name, allowed)}
        restored = _load_one_of(storage, sizes, job, parameters, plan, index, shard)
        # Where all that was listed had just been replaced by newer ones, those are tried.
        if restored.number is not None or candidates(sizes) == before:
            _report(restored.skipped)
            return restored


def _is_wanted(name: str, allowed: range | None) -> bool:
    return allowed is None or number_of(name) in allowed


def _load_one_of(
    storage: Storage,
    sizes: Mapping[str, int],
    job: str,
    parameters: Sequence[ParameterSpec],
    plan: ShardPlan,
    index: int,
    shard: Restorable,
) -> Restored:
    skipped: list[Skipped] = []
    for number in candidates(sizes):
        try:
            found = examine(number, storage.read(manifest_name(number)), sizes, job)
            if isinstance(found, Skipped):
                skipped.append(found)
                continue
            applied = load_shard_blocks(storage, found, parameters, plan, index, shard.restore_block)
        except (CorruptError, NotFoundError, UsageError) as error:
            skipped.append(Skipped(number, str(error)))
            continue
        return Restored(number, applied, tuple(skipped))
    skipped += without_manifest(dict(sizes))
    return Restored(None, None, tuple(skipped))


def _report(skipped: Iterable[Skipped]) -> None:
    for each in skipped:
        _log.warning("checkpoint %d is skipped: %s", each.number, each.reason)
